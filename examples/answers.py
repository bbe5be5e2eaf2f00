"""Measures how many questions about images that it was not trained on the model of `examples/vqa.yaml` answers.

raypipe train examples/vqa.yaml
python examples/answers.py runs/vqa
"""

from __future__ import annotations

from collections import Counter, defaultdict

from trained import from_command_line

from raypipe.data.fields import FieldDataset


def main() -> None:
    """Print the share of right answers beside that of two ways to guess."""
    trained = from_command_line("Answers to questions about images.", function="raypipe.models.vqa:vqa")
    usual_answer = most_frequent_answers(trained.data_path)
    num_questions, num_answers = trained.rows.num_rows, len(trained.rows.fields["answer"].labels)
    num_right = num_guessed = 0
    for batch, logits in trained.outputs(first=0, count=num_questions):
        num_right += int((logits.argmax(1) == batch["answer"]).sum())
        for question, answer in zip(batch["question"].numpy(), batch["answer"].tolist(), strict=True):
            num_guessed += usual_answer.get(question.tobytes()) == answer
    print(f"{num_questions} questions, {num_answers} answers to choose from")
    print(f"right: {num_right / num_questions:.1%} (by chance {1 / num_answers:.1%})")
    print(f"without the image, by the most frequent answer to the same question: {num_guessed / num_questions:.1%}")


def most_frequent_answers(path: str) -> dict[bytes, int]:
    """Return the most frequent answer to each question of the training split."""
    train = FieldDataset(path, seed=0)
    rows = train.rows(0, train.num_rows)
    counts: defaultdict[bytes, Counter[int]] = defaultdict(Counter)
    for question, answer in zip(rows["question"], rows["answer"].tolist(), strict=True):
        counts[question.tobytes()][answer] += 1
    return {question: answers.most_common(1)[0][0] for question, answers in counts.items()}


if __name__ == "__main__":
    main()
