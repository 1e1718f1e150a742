"""The paper's domain B: Shakespeare-style dialogue by people Shakespeare never named, from a seeded grammar.

A play is a row of scenes. Each scene fixes a theme, a cast, a town, an absent person and an object, so that
its speeches speak of the same things; a speech is a few sentences of one mood, set as verse, prose or song.
Rules are strings with {slots}; a slot is another rule, a word list, or something the scene has fixed.
"""

import random
import re
import textwrap
from collections.abc import Sequence
from typing import TypeVar

Choice = TypeVar("Choice")

CHARACTERS = frozenset("\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
"""The 65 characters of tiny Shakespeare."""
SMALLEST = 1_000  # fewer characters may not hold one speech


def _words(text: str) -> list[str]:
    return text.split("|") if "|" in text else text.split()


NAMES = _words(
    "Aldric Bertram Celestine Dorian Elowen Florian Gwendolyn Hadrian Isolde Jocelyn Kendric Leontyne "
    "Merewyn Norbert Oriel Percival Quillon Rosamund Sabine Tancred Ulric Vivienne Wystan Xanthe Yvaine "
    "Zephyrine"
)
MINOR = _words("First Warden|Second Warden|Old Ferryman|Chandler|Herald|Falconer|Nurse Maud")
TOWNS = _words("Harrowmere Estwick Thornhold Velmare Ostrand Pellamy Wynfell Carrock Dunmarrow Lorimar")

THEMES: dict[str, dict[str, str]] = {
    "war": {
        "person": "captain soldier archer rebel champion sentry",
        "thing": "sword banner trumpet breastplate gate siege ladder",
        "things": "lances drums walls wounds horses swords ramparts",
        "idea": "valour conquest courage defeat slaughter peace",
        "place": "field camp rampart breach trench",
    },
    "court": {
        "person": "king chancellor steward herald prince minister",
        "thing": "crown seal sceptre throne decree chain",
        "things": "titles letters counsels robes petitions favours",
        "idea": "majesty ambition duty flattery state policy",
        "place": "council chamber hall gallery palace",
    },
    "love": {
        "person": "lover maid sweetheart wooer bride suitor",
        "thing": "ring heart letter rose kiss garland",
        "things": "sighs vows blushes eyes verses lips",
        "idea": "beauty longing desire jealousy constancy fancy",
        "place": "orchard balcony arbour garden chapel",
    },
    "sea": {
        "person": "sailor pilot merchant pirate mariner boatswain",
        "thing": "mast anchor rudder wreck sail harbour",
        "things": "waves tempests sails shores tides rocks",
        "idea": "fortune peril shipwreck distance hope weather",
        "place": "harbour deck strand island haven",
    },
    "night": {
        "person": "ghost witch watchman sleeper murderer prophet",
        "thing": "candle bell dream shadow lantern grave",
        "things": "stars owls dreams whispers spirits tombs",
        "idea": "darkness sleep terror conscience silence doom",
        "place": "churchyard tower cloister moor cellar",
    },
    "law": {
        "person": "judge prisoner witness thief hangman advocate",
        "thing": "bond oath scaffold verdict pardon charge",
        "things": "crimes laws witnesses fetters proofs debts",
        "idea": "justice mercy guilt innocence revenge truth",
        "place": "court prison market gallows bench",
    },
    "feast": {
        "person": "host cook fiddler drunkard cousin guest",
        "thing": "cup table song pie barrel mask",
        "things": "jests dances cups pipes revels dishes",
        "idea": "mirth wine plenty folly friendship laughter",
        "place": "tavern kitchen hall cellar green",
    },
    "country": {
        "person": "shepherd ploughman miller goatherd widow pedlar",
        "thing": "plough brook meadow flock harvest hedge",
        "things": "lambs fields acorns blossoms streams furrows",
        "idea": "content labour plainness winter summer quiet",
        "place": "forest valley pasture mill cottage",
    },
}

WORDS = {
    "person": "man woman father brother sister friend enemy traitor fool stranger child master servant "
    "beggar widow nephew kinsman daughter tyrant scholar orphan neighbour",
    "thing": "hand tongue name promise cloak book purse sword house bed door stone fire glass bone "
    "feather mirror key ladder arrow coin shoe veil pillow window needle shield garment",
    "things": "tears words hands years thoughts deeds tongues promises bones sorrows friends enemies "
    "faces shadows secrets steps garments troubles oaths lies bells looks",
    "idea": "love honour grief time death envy patience shame pride reason pity nature virtue memory "
    "malice wit fear hunger treason gratitude solitude anger youth age wonder faith despair",
    "place": "city road wood chamber street bridge hill house wall orchard stair doorway kingdom barn ditch",
    "creature": "wolf lark hawk hound serpent lion sparrow fox raven lamb bee moth adder falcon",
    "nature": "sun moon wind frost river thunder morning snow sea star rain flame",
    "good": "gentle noble fair honest sweet constant valiant gracious tender wise merry faithful holy "
    "royal patient modest loyal cheerful blessed upright",
    "bad": "false cruel bitter idle wicked proud cold hollow weary bloody base foul jealous envious "
    "wretched savage sullen cunning greedy rotten crooked peevish",
    "plain": "old young poor little heavy ancient silent secret golden naked sudden distant broken common "
    "narrow crowded eastern forgotten wooden dusty lonely pale yellow",
    "how": "softly boldly truly swiftly bitterly gladly vainly wisely ever never seldom secretly kindly",
    "do": "guard love betray follow forgive curse teach serve honour wound fear praise seek crown bury "
    "mock deny trust hate keep hide break mend steal weigh scorn court tempt spare answer shame nourish",
    "did": "guarded loved betrayed followed forgave cursed taught served honoured wounded feared praised "
    "sought crowned buried mocked denied trusted hated kept hid broke mended stole weighed scorned "
    "tempted spared",
    "done": "guarded loved betrayed followed forgiven cursed taught served honoured wounded feared "
    "praised crowned buried mocked denied trusted hated kept hidden broken mended stolen weighed scorned "
    "tempted",
    "go": "weep sleep wander kneel speak fight wait laugh fall rise perish pray sing ride tremble return "
    "yield depart stay dream starve burn",
    "goes": "weeps sleeps wanders kneels speaks fights waits laughs falls rises sings rides trembles "
    "returns yields departs stays dreams starves burns",
    "will": "will shall must may would should can might",
    "number": "two three seven nine ten twenty forty",
    "span": "days nights hours winters summers years",
    "oath": "heaven|my soul|this hand|yonder light|my father's grave|all that is holy|mine honour|"
    "the rood|the five winds|my mother's ring|bread and salt|the bells of home",
    "hail": "good|sweet|gentle|noble|dear|worthy|brave|honest",
    "rank": "my lord|good sir|my friend|gentle cousin|madam|sweet heart|old friend|my liege|sirrah|"
    "neighbour|my masters|brother|good dame|young sir|fellow|gentlemen",
    "alas": "Alas|Ah|O|Fie|Marry|Why|Nay|Soft|Faith|Well|Come|Peace|Now|Indeed|Hark",
    "when": "to-night|to-morrow|ere the dawn|at noon|before the moon be up|this very hour|"
    "when summer comes|upon the feast of fools|ere I be old|while yet we breathe|at cock-crow|"
    "within the hour|after the feast|as soon as may be|by candle-light|three days hence|upon the morrow",
    "why": "for I have sworn it|since thou wilt have it so|or I am no true man|as all the town can tell|"
    "though it should cost me dear|if men may be believed|and let no man gainsay it|"
    "which none but fools deny|and so the matter ends|for thus my mother taught me|"
    "as sure as winter follows|when other men would sleep|and more than this I dare not|"
    "till every candle fail",
}

RULES = {
    "who": "the {good} {person}|the {bad} {person}|the {person}|my {person}|thy {person}|{absent}|"
    "this {plain} {person}|a {person} of {town}|our {good} {absent}|that {bad} {person}|"
    "thy {plain} {person}|every {person} {where}|mine own {person}",
    "one": "the {thing}|my {thing}|thy {bad} {thing}|the {plain} {matter}|this {thing}|{idea}|"
    "a {good} {thing}|the {thing} of {idea}|the {matter}|all thy {idea}|what {absent} {did}|"
    "a {thing} of {plain} {idea}|every {thing}|the {matter} of {town}|mine own {thing}|"
    "the {idea} of {who}|yon {plain} {thing}|no {thing} but this|{bad} {idea}",
    "what": "{one}|{one}|{one}|our {things}|thy {things}|{number} {things}|the {bad} {things}|"
    "such {plain} {things}|the {things} of {town}",
    "where": "in the {place}|by the {nature}|at {town}|beyond the {place}|within this {plain} {place}|"
    "upon the road to {town}|beneath the {nature}|under the {plain} {nature}|at the {place} door|"
    "on the {plain} {place}|hard by the {place}|where the {creature} {goes}|across the {nature}|"
    "here in {town}",
    "like": "like a {creature} in the {place}|as the {nature} {will} {do} the {nature}|like {plain} {things}|"
    "as {things} in {idea}|like the {bad} {creature}|as {idea} follows {idea}|"
    "like {a_pair} in one {place}|more {bad} than the {creature}|as {good} as the {nature}|"
    "as {bad} men {do} {idea}|like {idea} at a {place} door|as a {person} {will} {do} a {creature}",
    "a_pair": "{number} {things}|a {creature} and a {creature}|the {nature} and the {nature}",
    "act": "{do} {what}|{do} {who}|{go} {where}|{how} {do} {what}|{go} for {who}|{go}|{do} {what} {where}|"
    "make {a_pair} of {idea}|give {what} to {who}|leave {what} to {idea}|bid {who} {go}|"
    "speak of {what}|{do} the {thing} that {who} {did}|{go} with {name}|swear to {do} {who}|"
    "learn to {go}|lend {who} {what}|turn {what} to {things}|ride to {town} and {do} {who}|"
    "hold {what} for {idea}|never {do} {what}|send {number} {things} to {absent}",
    "claim": "{who} {will} {act}|{who} hath {done} {what}|{one} is {done} by {who}|thou {thou} {act}|"
    "{idea} is a {bad} {thing}|{idea} {goes} {where}|I {will} {act}|{who} {did} {what} {where}|"
    "the {creature} {goes} {where}|there is {idea} in {what}|we {will} {act}|thou art {like}|"
    "I have {done} {who}|{one} lies {where}|my {idea} {goes} {like}|no {person} {will} {act}|"
    "{idea} hath no {thing}|{number} {span} have I {done} {what}|he that {goes} {will} {act}|"
    "the {nature} {will} {do} {what}|such {things} as these {will} {act}|"
    "they say {absent} {goes} {where}|I am {done} by {idea}|{who} loves {what} more than {idea}|"
    "it was {absent} that {did} {what}|{who} knows {what}|the {things} of {town} are {done}|"
    "men {will} {do} {what} for {idea}|I saw {who} {go} {where}|{absent} and {absent_too} {did} {who}|"
    "never was {thing} so {done}|thou hast {done} {what}|nor {idea} nor {idea} {will} {do} me|"
    "mine eyes have {done} {what}|a {creature} {will} {do} a {creature}|{who} was {done} {where}|"
    "the {matter} is not {done}|we are but {things} {where}",
    "thou": "wilt|shalt|canst|mayst|must|wouldst|dost|didst",
    "tail": ", {why}|, {like}| {when}|, and {claim}|; {claim}|: {claim}|, but {claim}||||, where {claim}|"
    ", till {claim}|; yet {claim}|, lest {claim}|, for {claim}|, as {who} {did}| {where}|"
    ", unless {claim}|, and so {will} {who}|, {call}",
    "call": "{hail} {name}|{name}|{rank}|{name}|{rank}|thou {bad} {person}|{hail} {person}",
    "say": "{claim}{tail}.|{claim}{tail}.|{alas}, {claim}{tail}.|{claim}, {call}{tail}.|"
    "{when}, {call}, {claim}.|if {claim}, then {claim}{tail}.|when {who} {goes}, {claim}{tail}.|"
    "though {claim}, yet {claim}.|{where} {claim}{tail}.|not {who} nor {who} {will} {act}{tail}.|"
    "{claim}; so {claim}.|as {claim}, so {claim}.|he {goes} best that {goes} {how}{tail}.|"
    "what {absent} {did}, {who} {will} {do}.|{who}, that {did} {what}, {goes} {where}.|"
    "I think {claim}{tail}.|mark me, {call}: {claim}{tail}.|"
    "it is not {idea} but {idea} that {goes} {where}.|some {do} {what}, some {go} {where}; {claim}.|"
    "yet {claim}{tail}.|and {claim}{tail}.|to {act} is to {act}.|"
    "for {who} I {will} {act}; for {who}, {act}.|this {thing} {did} {who}, and {claim}.",
    "ask": "{question}, {call}?|{alas}, {question}?|{question}?|say, {call}, {question}?|"
    "{question}, or {question}?|what, {question}?|but {question}? {question}?",
    "question": "who {did} {what}|dost thou {act}|what {person} {goes} {where}|where is {one}|"
    "why dost thou {act} {like}|hath {absent} {done} {what}|is {one} {done}|how fares {who}|"
    "wilt thou {act} {when}|shall {who} {act}|what says {absent} of the {matter}|know'st thou {who}|"
    "is there no {thing} for {who}|who {goes} there|how many {things} hath {who} {done}|"
    "whose {thing} is this|whither {goes} {who}|what is {idea} but a {thing}|have I {done} {who}|"
    "must I {act} for {who}|art thou {done}|when {will} {who} {act}|which of these {things} is {good}|"
    "canst thou {act}|what {thing} is that {where}",
    "reply": "{alas}, {call}, {claim}{tail}.|no, {call}: {claim}{tail}.|ay, {claim}{tail}.|not I, {call}.|"
    "I know not, {call}; {claim}.|'tis {done}, {call}.|{claim}, {why}.|so {claim}.|"
    "{absent} {will} tell thee{tail}.|ask {who}, not me: {claim}.|by {oath}, {claim}{tail}.|"
    "as {good} as any {person} {where}.|I did so, {call}; {claim}.|never, {call}.|"
    "so please you, {claim}.|what {absent} bade me: {claim}.|more than I {will} tell, {call}.|"
    "{who}, I think, and {who}.|too well, {call}; {claim}{tail}.|{where}, {call}, {claim}.",
    "bid": "{alas}, {act}, and {act}!|{call}, {act} {when}.|let {who} {act}{tail}.|go, {call}, {act}{tail}.|"
    "{act}, {call}; {act}.|bring me {what}, {call}.|let not {who} {act}, {why}.|"
    "stand, {call}! {claim}.|to {town}, {call}, and {act}!|fetch the {matter} {when}, or {claim}.|"
    "hold, {call}; {claim}.|hence, and {act}!|swear it, {call}: swear to {act}.|"
    "give me the {matter}, {call}, {why}.|look, {call}, {where}: {claim}.|no more, {call}; {act}.|"
    "tell {absent} that {claim}.",
    "swear": "by {oath}, I {will} {act}{tail}.|I swear by {oath}, {claim}.|now by {oath}, {call}, {claim}!|"
    "may {idea} {do} me if {claim}.|here is my {thing}: {claim}, {why}.|if I {act}, let {who} {do} me.|"
    "this {thing} upon it, {call}: {claim}.|while the {nature} {goes}, I {will} {act}.",
    "mourn": "O {idea}, O {bad} {idea}!|O {bad} {thing}, that {who} {did}!|"
    "alas, {who} {goes} no more {where}.|my {things} are {things} of {idea}{tail}.|"
    "O that {who} had {done} {what}!|weep, {call}: {claim}.|"
    "where now is {one}? Where is {one}?|I had {a_pair} once, and {idea} {did} them.|"
    "O, I am {done}, {call}!|here {goes} a {person} that {did} {what}.|"
    "had I but {done} {what}, {who} had {done} me.|away, you {bad} {things}!|"
    "{things}, {things}, and never a {thing} of {idea}.|so {goes} {idea}; so {goes} {who}.",
    "mock": "thou {bad} {creature}, thou {thing} of {idea}!|{claim}? Ay, as the {creature} {goes} {where}.|"
    "a {person}! a {bad}, {plain} {person}!|I have seen {things} more {good} than thou.|"
    "thy {thing} is {like}.|thou hast the {thing} of a {creature} and the {idea} of a {person}.|"
    "what, {call}? the {creature} hath more {idea}.|go, {do} a {creature}.|I {will} {do} thee {like}.|"
    "is this a {person}? is this {idea}?|a {thing} {will} {do} thee as soon as {who}.|"
    "thou speak'st {like}.",
    "news": "{absent} is come from {town}, {call}, with {number} {things}.|"
    "the {matter} is {done}, {call}; {claim}.|they have {done} the {matter} {where}.|"
    "{who} was seen {where}{tail}.|there came a {person} from {town}: {claim}.|"
    "{absent} hath {done} {absent_too}, {why}.|{who} is {done} {where}, and {who} {goes} free.|"
    "at {town} they {do} {what}, {call}.|I have it from {who}: {claim}.|{when} {absent} {will} {act}.|"
    "the {matter} that {absent} {did} is {where}.|{number} {things} were {done} {where}, {call}.",
    "wisdom": "{idea} {goes} where {idea} {goes}.|a {good} {thing} is better than {number} {bad} {things}.|"
    "who {goes} with the {creature} must {act}.|few {things}, few {things}.|"
    "the {nature} asks not why the {creature} {goes}.|"
    "{idea} is the {thing} of {good} men, and {idea} their {thing}.|"
    "{do} {idea}, and {idea} {will} {do} thee.|he that hath {idea} needs no {thing}.|"
    "no {creature} {goes} but a {creature} {goes} after.|{plain} {things} make {bad} {things}.|"
    "when {idea} {goes}, {idea} {goes} too.|better {a_pair} than {idea}.",
    "part": "farewell, {call}; {claim}.|I must to {town} {when}.|good night, {call}, and {act}.|"
    "adieu, {call}: {claim}{tail}.|we meet {where} {when}.|no more to-night, {call}; {claim}.|"
    "come, {call}, {where}, and {act}.|go thou to {town}; I {will} {act}.",
    "greet": "good morrow, {call}.|well met, {call}; {question}?|heaven keep thee, {call}: {claim}.|"
    "hail, {call}! {claim}{tail}.|here comes {who}, {call}.|stand there, {call}: {question}?|"
    "how now, {call}? {claim}.|what, {call}, {where}?|you are welcome to {town}, {call}{tail}.|"
    "who {goes} there? {call}?",
    "chorus": "now think you stand {where}, where {claim}.|our play is come to {town}; {claim}.|"
    "{number} {span} are gone, and {who} {goes} {where}.|of {idea} and {idea} we sing, and {who}.|"
    "hear then how {absent} {did} {what}, and how {absent_too} {did} {who}.|"
    "sit still, you {good} hearers: {claim}{tail}.|the {matter} of {town} is {done}, and {claim}.|"
    "from {town} to the {place} {goes} {absent_too}.|"
    "let {idea} be your {thing}, and {idea} your {thing}.",
    "rest": "heigh-ho, the {nature} and the {nature}!|sing low, my {creature}, sing low.|"
    "with a hey, and a {creature}, hey!|and {go}, my {good} one, {go}.|hey down, derry down, and {go}.|"
    "O the {nature}, the {nature} and {idea}!",
    "sung": "the {plain} {nature} and the {good} {rhyme},|with {things}, {things}, and {rhyme},|"
    "O {do} me by the {bad} {rhyme},|and never a {person} to {do} the {rhyme};|"
    "my {idea} is {done} for the {rhyme}.|a {creature} sang of {idea} and {rhyme},|"
    "the {person} {goes} to the {plain} {rhyme}:|{number} {things} for a {good} {rhyme},|"
    "for {idea} {goes} {how} to the {rhyme}.|when {things} {go} to the {rhyme},|"
    "there was a {person}, and a {rhyme},|bring {idea}, bring {a_pair}, bring {rhyme};|"
    "say who {will} {do} the {rhyme}?",
}

MOODS = ("say", "say", "say", "ask", "ask", "bid", "bid", "swear", "mourn", "mock", "news", "wisdom")
RHYMES = _words(
    "day way play clay bay|night light sight flight knight|sea tree bee key lea|"
    "rain lane plain grain chain|bell dell well knell shell|sheep sleep deep keep steep|"
    "stone bone throne moan loan|rose snows woes crows|hill mill rill chill quill|"
    "song wrong throng thong|air care stair prayer snare|gold cold fold mould hold|"
    "fire choir briar lyre wire|ground sound hound mound round|tower flower bower hour shower"
)


WORD_LISTS = {slot: _words(text) for slot, text in WORDS.items()}
RULE_LISTS = {slot: _words(text) for slot, text in RULES.items()}


class _Scene:
    """What one scene has fixed, and the expansion of rules within it."""

    def __init__(self, source: random.Random) -> None:
        self.source = source
        self.theme = {slot: _words(text) for slot, text in self.pick(list(THEMES.values())).items()}
        self.latest: dict[str, str] = {}
        names = list(NAMES)
        drawn = [names.pop(self.below(len(names))) for _ in range(4 + self.below(3))]
        self.cast = [*drawn[2:], self.pick(MINOR)] if self.below(3) == 0 else drawn[2:]
        town, matter = self.pick(TOWNS), self.pick(self.theme["thing"])
        self.fixed = {"absent": drawn[0], "absent_too": drawn[1], "town": town, "matter": matter}

    def below(self, limit: int) -> int:
        # random() is the one method whose stream Python promises to keep from version to version.
        return int(self.source.random() * limit)

    def pick(self, choices: Sequence[Choice]) -> Choice:
        return choices[self.below(len(choices))]

    def fill(self, slot: str) -> str:
        if slot in self.fixed:
            return self.fixed[slot]
        if slot in RULE_LISTS:
            return re.sub(r"\{(\w+)\}", lambda match: self.fill(match[1]), self.pick(RULE_LISTS[slot]))
        words = self.theme[slot] if slot in self.theme and self.below(2) else WORD_LISTS[slot]
        word = self.pick(words)
        if word == self.latest.get(slot):  # "the sea and the sea"
            word = words[(words.index(word) + 1) % len(words)]
        self.latest[slot] = word
        return word

    def sentence(self, rule: str) -> str:
        text = re.sub(r"\b([Aa]) (?=[aeiou]|hon|hour)", r"\1n ", self.fill(rule))
        return text[0].upper() + text[1:] if text[0] != "'" else "'T" + text[2:]

    def speech(self, speaker: str, listener: str, rules: Sequence[str]) -> str:
        """Verse starts every line with a capital, prose runs on."""
        self.fixed["name"] = listener
        sentences = [self.sentence(rule) for rule in rules]
        if self.below(5) == 0:
            lines = textwrap.wrap(" ".join(sentences), 58 + self.below(10), break_on_hyphens=False)
        else:
            width = 38 + self.below(14)
            blocks = sentences if self.below(3) else [" ".join(sentences)]
            lines = [line for text in blocks for line in textwrap.wrap(text, width, break_on_hyphens=False)]
            lines = [line[0].upper() + line[1:] for line in lines]
        return _spoken(speaker, lines)

    def song(self, speaker: str, listener: str) -> str:
        self.fixed["name"] = listener
        lines = []
        for _ in range(1 + self.below(2)):
            rhymes = _words(self.pick(RHYMES))
            for _ in range(4):
                self.fixed["rhyme"] = rhymes.pop(self.below(len(rhymes)))
                lines.append(self.sentence("sung"))
            lines.append(self.sentence("rest"))
        return _spoken(speaker, lines)

    def play(self, opens_act: bool) -> list[str]:
        speaker, listener = self.cast[0], self.cast[1]
        speeches = [self.speech("Chorus", listener, ["chorus"] * (2 + self.below(2)))] if opens_act else []
        speeches.append(self.speech(speaker, listener, ["greet", *self.moods()]))
        asked = False
        for _ in range(6 + self.below(14)):
            speaker, listener = listener, speaker
            if not asked and self.below(3) == 0:  # a third voice joins
                speaker = self.pick([name for name in self.cast if name != listener])
            if self.below(24) == 0:
                speeches.append(self.song(speaker, listener))
                continue
            rules = ["reply", *self.moods()[1:]] if asked else self.moods()
            speeches.append(self.speech(speaker, listener, rules))
            asked = rules[-1] == "ask"
        speeches.append(self.speech(listener, speaker, ["part"]))
        return speeches

    def moods(self) -> list[str]:
        """One sentence or a few; now and then a long speech."""
        length = self.pick((1, 1, 1, 2, 2, 3, 4, 7))
        return [self.pick(MOODS) for _ in range(length)]


def _spoken(speaker: str, lines: Sequence[str]) -> str:
    # Tiny Shakespeare prints the names of people in capitals and those of roles as written.
    return "\n".join([f"{speaker.upper() if speaker in NAMES else speaker}:", *lines]) + "\n\n"


def write(size: int = 200_000, seed: int = 0) -> str:
    """Write at most `size` characters of dialogue, whole speeches alone; a seed always gives the same.

    A shorter text is the beginning of a longer one.
    """
    if not isinstance(size, int) or size < SMALLEST:
        raise ValueError(f"size={size!r} must be an integer, {SMALLEST} or more")
    if not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed={seed!r} must be an integer, 0 or more")
    source = random.Random(seed)
    speeches: list[str] = []
    length = scenes = 0
    while True:
        for speech in _Scene(source).play(opens_act=scenes % 4 == 0):
            if length + len(speech) - 1 > size:
                return "".join(speeches)[:-1]  # the file ends with one newline, not an empty line
            speeches.append(speech)
            length += len(speech)
        scenes += 1
