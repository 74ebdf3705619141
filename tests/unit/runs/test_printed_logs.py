"""What training scripts print is read back: every format, any number, ranks, bars, epochs, noise and damage."""

import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from steadystep.errors import ConfigError
from steadystep.runs.open import find_runs, open_run
from steadystep.runs.reading import unjudged_objective
from steadystep.runs.run import Run
from steadystep.runs.text_line import plain_text, read_line
from tests.unit.runs.printed import FORMATS, WITH_NORM, WITH_RATE, Point, megatron, nano_gpt, torchtitan

POINTS = [Point(10 * i, 2.0 + 8.0 / (1 + i), 1.5 / (1 + i), 1e-4 * (i + 1)) for i in range(1, 61)]
PREAMBLE = [
    "WARNING: torch.distributed is starting 8 processes",
    "  hidden_size ..................................... 768",
    "  lr .............................................. 0.0006",
    "  aux_loss_coeff .................................. 0.01",
    "number of parameters: 123.59M",
    "NCCL INFO comm 0x55d0 rank 0 nranks 8 busId 1b000",
]


def log(folder: Path, lines: list[str], name: str = "train.log") -> Path:
    path = folder / name
    path.write_bytes("\n".join(lines).encode())
    return path


def same(found: np.ndarray, wanted: list[float]) -> bool:
    return bool(np.array_equal(found, np.array(wanted), equal_nan=True))


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_is_read_for_what_it_is(tmp_path: Path, name: str) -> None:
    run = open_run(log(tmp_path, [*PREAMBLE, *map(FORMATS[name], POINTS), "saved checkpoint to out-600"]))
    assert run.loss.steps.tolist() == [p.step for p in POINTS]
    assert run.loss.values.tolist() == [p.loss for p in POINTS]
    assert run.grad_norm.values.tolist() == ([p.norm for p in POINTS] if name in WITH_NORM else [])
    assert run.lr.values.tolist() == ([p.lr for p in POINTS] if name in WITH_RATE else [])
    assert run.restarts == ()
    assert run.read.startswith("read ")
    assert "loss=" in run.read


losses = st.one_of(st.floats(), st.floats(0.0, 1e6), st.sampled_from([math.nan, math.inf, -math.inf, 0.0]))


@given(st.sampled_from(sorted(FORMATS)), st.lists(losses, min_size=2, max_size=12), st.integers(0, 500))
@example("nano_gpt", [math.nan, math.inf, -math.inf], 0)
@example("megatron", [1e-300, 5e-324, 1.7976931348623157e308], 7)
def test_any_numbers_are_read_back(name: str, values: list[float], first: int) -> None:
    points = [Point(first + i, value, abs(value), 1e-3) for i, value in enumerate(values)]
    with tempfile.TemporaryDirectory() as folder:
        run = open_run(log(Path(folder), list(map(FORMATS[name], points))))
    kept = run.loss.steps.tolist()
    by_step = {p.step: p.loss for p in points}
    assert same(run.loss.values, [by_step[step] for step in kept])
    assert len(kept) == len(values) or (np.isnan(values).mean() >= 0.5)  # NaN that comes and goes: not logged


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("nan", math.nan), ("NaN", math.nan), ("-nan", math.nan), ("NAN", math.nan), ("nan(ind)", math.nan),
        ("-nan(ind)", math.nan), ("-1.#IND", math.nan), ("1.#QNAN", math.nan), ("inf", math.inf), ("-inf", -math.inf),
        ("Infinity", math.inf), ("INF", math.inf), ("1.#INF", math.inf), ("-1.#INF", -math.inf), ("∞", math.inf),
        ("1e999", math.inf), ("+2.5", 2.5), (".5", 0.5), ("3.", 3.0), ("1.2E+00", 1.2), ("1,048.5", 1048.5),
        ("'2.5'", 2.5), ('"2.5"', 2.5), ("tensor(2.5)", 2.5), ("np.float32(2.5)", 2.5), ("[2.5]", 2.5),
    ],
)  # fmt: skip
@pytest.mark.parametrize("line", ["step 5 loss {}", "step=5, loss={}", "step: 5 | loss: {} | x: 1", "loss: {} step: 5"])
def test_a_number_in_any_spelling(line: str, text: str, value: float) -> None:
    found = read_line(line.format(text))
    assert same(np.array([found.values["loss"]]), [value])
    assert found.step == 5.0


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("validation loss at iteration 1000 | lm loss value: 2.9E+00 | lm loss PPL: 1.8 |", {"val lm loss value": 2.9}),
        ("step 0: train loss 4.28, val loss 4.29", {"train loss": 4.28, "val loss": 4.29}),
        ("Epoch 1 | iter 4 step 1 | loss train: 2.3, val: 2.5 | time: 3.1 ms", {"loss train": 2.3, "val loss": 2.5}),
        ("[Val] Epoch 3 Loss 0.6 acc 0.7", {"val Loss": 0.6, "val acc": 0.7}),
        ("2025 | INFO | valid | epoch 001 | valid on 'valid' subset | loss 11.2 | best_loss 11.1", {"val loss": 11.2}),
        ("Test set: Average loss: 0.05, Accuracy: 0.98", {"val Average loss": 0.05, "val Accuracy": 0.98}),
        (" 12/100 [==>....] - ETA: 0s - loss: 0.53 - val_loss: 0.61", {"loss": 0.53, "val_loss": 0.61}),
        ("Epoch 00001: val_loss improved from 0.63 to 0.59, saving model", {}),
        ("number of nan iterations:   0", {}),
        ("| loss                 | 0.245        |", {"loss": 0.245}),
        ("Epoch: [0][  10/1251]\tTime 0.5 ( 0.9)\tLoss 6.9e+00 (7.0e+00)\tAcc@1   0.5 (  0.1)", {"Loss": 6.9}),
        ("test.py:12 loss 2.5", {"loss": 2.5}),
        ("training has lost 3 workers", {}),
    ],
)  # fmt: skip
def test_losses_are_known_by_their_names(line: str, names: dict[str, float]) -> None:
    found = read_line(line)
    told = {name: value for name, value in found.values.items() if name in names or "loss" in name.lower().split("_")}
    assert {k: v for k, v in told.items() if k not in ("best_loss", "lm loss PPL")} == names


def test_a_nan_among_words_is_a_word() -> None:
    assert read_line("| number of nan iterations:   0 | x: 1 |").values == {"number of nan iterations": 0.0, "x": 1.0}


def test_colors_and_titles_of_a_terminal_are_no_text() -> None:
    assert plain_text("\x1b[1;31mloss\x1b[0m: \x1b[?25l2.5\x1b]0;title\x07!") == "loss: 2.5!"


def interleaved(folder: Path, ranks: int) -> Run:
    rng = np.random.default_rng(0)
    lines: list[str] = []
    for point in POINTS:
        own = [torchtitan(point._replace(loss=point.loss + r)).replace("rank0", f"rank{r}") for r in range(ranks)]
        lines += [own[i] for i in rng.permutation(ranks)]
    return open_run(log(folder, lines))


def test_of_interleaved_ranks_one_is_read(tmp_path: Path) -> None:
    run = interleaved(tmp_path, 4)
    assert run.loss.values.tolist() == [p.loss for p in POINTS]
    assert any("4 ranks print losses: those of rank 0 are read" in note for note in run.notes)


@pytest.mark.parametrize("prefix", ["[default7]: ", "[1,7]<stdout>:", "7: ", "[Rank 7] ", "rank=7 "])
def test_the_rank_that_prints_losses_is_read(tmp_path: Path, prefix: str) -> None:
    other = prefix.replace("7", "0")
    lines = [text for p in POINTS for text in (f"{other}step {p.step} waiting", prefix + nano_gpt(p))]
    assert open_run(log(tmp_path, lines)).loss.values.tolist() == [p.loss for p in POINTS]


def test_lines_that_every_process_prints_count_once(tmp_path: Path) -> None:
    texts = [nano_gpt(p) for p in POINTS for _ in range(4)]
    texts[9], texts[12] = texts[12], texts[9]  # one process is ahead
    run = open_run(log(tmp_path, texts))
    assert run.loss.values.tolist() == [p.loss for p in POINTS]
    assert (run.restarts, "180 repeated lines were skipped" in run.notes) == ((), True)


def test_steps_that_start_again_in_each_epoch_are_counted_on(tmp_path: Path) -> None:
    places = [(e, i) for e in range(3) for i in range(1, 21)]
    made = {
        "bars": [f"Epoch {e}:  3%|▎ | {i}/20 [00:01<00:09, 2.1it/s, loss={5 - e}]" for e, i in places],
        "fractions": [f"Train Epoch: {e} [{i * 64}/1280 (5%)]\tLoss: {5 - e}" for e, i in places],
        "steps": [f"Epoch [{e}/3], Step [{i}/20], Loss: {5 - e}" for e, i in places],
        "keras": [f"{f'Epoch {e}/3' if i == 1 else ''}\r{i}/20 [=>.] - ETA: 0s - loss: {5 - e}" for e, i in places],
    }
    for name, lines in made.items():
        run = open_run(log(tmp_path, lines, f"{name}.log"))
        every = 64 if name == "fractions" else 1
        assert run.loss.steps.tolist() == [every * i for i in range(1, 61)], name
        assert run.loss.values.tolist() == [5.0] * 20 + [4.0] * 20 + [3.0] * 20
        assert run.restarts == ()
    rows = [f"{e},{i},{5 - e}" for e in range(3) for i in range(20)]
    run = open_run(log(tmp_path, ["epoch,batch,loss", *rows], "a.csv"))
    assert run.loss.steps.tolist() == list(range(60))


def test_epochs_alone_are_counted_as_rows(tmp_path: Path) -> None:
    run = open_run(log(tmp_path, [f"Epoch {e}/30 - loss: {3 - e / 20} - val_loss: {3 - e / 25}" for e in range(30)]))
    assert (len(run.loss), len(run.validation["val_loss"]), run.step_unit) == (30, 30, "epoch")


def test_a_step_that_is_only_named_once_does_not_swallow_the_run(tmp_path: Path) -> None:
    run = open_run(log(tmp_path, ["step: 0 begins", *(f"loss: {p.loss}" for p in POINTS)]))
    assert run.loss.values.tolist() == [p.loss for p in POINTS]
    assert run.step_unit == "row"


def test_the_bar_of_an_evaluation_is_not_the_step(tmp_path: Path) -> None:
    lines: list[str] = []
    for p in POINTS:
        lines.append(f"\r  1%|▏ | {p.step}/873 [00:10<10:00, 1.0s/it]\n{{'loss': {p.loss}, 'epoch': 0.1}}")
        if p.step % 100 == 0:
            lines.append("".join(f"\r {i}%|▏ | {i}/40 [00:10<10:00, 1.0s/it]" for i in range(41)))
            lines.append("{'eval_loss': 2.5, 'eval_runtime': 3.0, 'epoch': 0.1}")
    run = open_run(log(tmp_path, lines))
    assert run.source == "transformers"
    assert run.loss.steps.tolist() == [p.step for p in POINTS]
    assert run.validation["val_loss"].steps.tolist() == [100, 200, 300, 400, 500, 600]


def test_a_table_under_a_header_of_names(tmp_path: Path) -> None:
    rows = [f"{i}         {3.0 / (1 + i):.6f}    {3.1 / (1 + i):.6f}    0.85    00:10" for i in range(20)]
    run = open_run(log(tmp_path, ["", "epoch     train_loss  valid_loss  accuracy  time", *rows], "fit.txt"))
    assert run.loss.values.tolist() == [round(3.0 / (1 + i), 6) for i in range(20)]
    assert len(run.validation["val_loss"]) == 20


def test_a_resumed_run_and_a_second_run_in_one_file(tmp_path: Path) -> None:
    again = [*map(megatron, POINTS[:40]), "Traceback (most recent call last):", *map(megatron, POINTS[30:])]
    again[30] = megatron(POINTS[30]._replace(loss=9.0))
    run = open_run(log(tmp_path, again))
    assert run.restarts == (POINTS[30].step,)
    assert run.loss.values.tolist() == [p.loss for p in POINTS]
    anew = [*map(nano_gpt, POINTS), *(nano_gpt(p._replace(loss=p.loss + 1.0)) for p in POINTS)]
    run = open_run(log(tmp_path, anew))
    assert run.loss.values.tolist() == [p.loss + 1.0 for p in POINTS]
    assert any("several runs: the last one is read" in note for note in run.notes)


def test_noise_damage_and_a_torn_last_line(tmp_path: Path) -> None:
    texts = [megatron(p).encode() for p in POINTS]
    noise = [
        b"\xff\xfe\x00\x01garbage\x00",
        b"x" * 100_000,
        "损失 ∑ é".encode(),
        b"\x00" * 64,
        b"| | |",
        b"loss",
        b"loss:",
    ]
    mixed = [part for i, text in enumerate(texts) for part in (text, noise[i % len(noise)])]
    path = tmp_path / "a.log"
    path.write_bytes(b"\r\n".join([*mixed, texts[-1][:150]]))
    assert open_run(path).loss.values.tolist() == [p.loss for p in POINTS]
    path.write_text("\r\n".join(map(nano_gpt, POINTS)), encoding="utf-16")  # as PowerShell redirects
    assert open_run(path).loss.values.tolist() == [p.loss for p in POINTS]


def test_the_reader_says_what_it_used(tmp_path: Path) -> None:
    run = open_run(log(tmp_path, [megatron(p) for p in POINTS]))
    assert run.read == "read 60 rows: step=iteration, loss=lm loss, grad_norm=grad norm, lr=learning rate"
    run = open_run(log(tmp_path, [f"step {p.step} nll_loss {p.loss + 1} loss {p.loss}" for p in POINTS]))
    assert run.loss.values.tolist() == [p.loss for p in POINTS]
    assert "other losses: 'nll_loss'; --column loss=NAME reads another" in run.notes
    run = open_run(run.path, {"loss": "nll_loss"})
    assert run.loss.values.tolist() == [p.loss + 1 for p in POINTS]


def test_a_text_without_a_loss_gets_a_message(tmp_path: Path) -> None:
    path = log(tmp_path, [*PREAMBLE, "step 10 done", "step 20 done"])
    with pytest.raises(ConfigError, match="no loss found in 8 lines"):
        open_run(path)


def test_printed_logs_of_a_folder_are_found_and_other_texts_are_not(tmp_path: Path) -> None:
    log(tmp_path, ["torch==2.6", "numpy"], "requirements.txt")
    log(tmp_path, [], "empty.log")
    (tmp_path / "out").mkdir()
    path = log(tmp_path / "out", [nano_gpt(p) for p in POINTS], "train.out")
    assert find_runs(tmp_path) == (path,)


@given(st.binary(max_size=400))
@example(b"loss " * 80)
@example(b"\x1b[" * 100 + b"loss: 1")
def test_any_bytes_are_a_run_or_a_message(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.log"
        path.write_bytes(content)
        try:
            open_run(path)
        except ConfigError:
            return


def test_the_table_of_a_reinforcement_learner(tmp_path: Path) -> None:
    lines: list[str] = []
    for i, p in enumerate(POINTS):
        names = {
            "ep_rew_mean": i,
            "total_timesteps": 2048 * (i + 1),
            "approx_kl": 0.01,
            "loss": p.loss,
            "n_updates": 10 * i,
            "value_loss": 0.5,
        }
        lines += ["| rollout/ | |", *(f"| {name:<16} | {value!r:<12} |" for name, value in names.items()), "-" * 30]
    run = open_run(log(tmp_path, lines))
    assert run.loss.steps.tolist() == [2048 * (i + 1) for i in range(60)]
    assert run.loss.values.tolist() == [p.loss for p in POINTS]
    assert {"approx_kl", "n_updates"} <= set(run.metrics)
    assert run.metrics["value_loss"].steps.tolist() == run.loss.steps.tolist()
    assert unjudged_objective(run) == "reinforcement learning"


def test_two_losses_of_equal_right_are_named(tmp_path: Path) -> None:
    run = open_run(log(tmp_path, [f"step {p.step} loss_a {p.loss} loss_b {p.norm}" for p in POINTS]))
    assert run.read == "read 60 rows: step=step, loss=loss_a; also a loss: loss_b (--column loss=NAME)"
    assert open_run(run.path, {"loss": "loss_b"}).read == "read 60 rows: step=step, loss=loss_b"


def test_random_bytes_with_a_printable_look_are_no_run(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(np.random.default_rng(0).integers(32, 255, 200_000, dtype=np.uint8).tobytes())
    with pytest.raises(ConfigError, match="no loss found in"):
        open_run(path)
