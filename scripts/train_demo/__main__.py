# SPDX-License-Identifier: Apache-2.0
"""Train the demo checkpoint from scratch on the Python documentation and standard library, or its drafters."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import data
import draft_data
import draft_model
import draft_report
import draft_train
import model
import report
import tok
import torch
import torch._dynamo.config
import torch._inductor.config
import train
from tokenizers import Tokenizer

import export
from nemo_build.spec import load_spec

DEMO = Path(__file__).resolve().parents[2] / "nemo_build" / "demo"


def arguments() -> argparse.Namespace:
    """The command line; the defaults are those of the published checkpoints."""
    parser = argparse.ArgumentParser(prog="train_demo", description=__doc__)
    parser.add_argument(
        "what", nargs="?", choices=("checkpoint", "drafters"), default="checkpoint", help="what to train"
    )
    parser.add_argument(
        "--out", type=Path, default=DEMO / "checkpoint", help="the checkpoint; drafters are trained for it"
    )
    parser.add_argument("--drafters-out", type=Path, default=DEMO / "drafters")
    parser.add_argument(
        "--docs", type=Path, help="unpacked python3.11-doc package (default: apt-get download)"
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path(tempfile.gettempdir()) / "nemo-demo",
        help="folder for the log and the resumable state",
    )
    parser.add_argument("--steps", type=int, default=4600, help="trunk steps")
    parser.add_argument(
        "--decay-steps", type=int, default=1400, help="trunk steps with falling learning rate"
    )
    parser.add_argument("--mtp-steps", type=int, default=500)
    parser.add_argument("--draft-steps", type=int, default=1200)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--mtp-length", type=int, default=256)
    parser.add_argument("--draft-length", type=int, default=256, help="tokens of the drafters' rows")
    parser.add_argument("--draft-prompts", type=int, default=4096, help="texts the drafters learn from")
    parser.add_argument("--anchors", type=int, default=48, help="blocks in a row of the drafters' texts")
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--share-cpu", action="store_true", help="use one thread while others are busy")
    parser.add_argument("--resume", action="store_true", help="continue from the state in --work")
    parser.add_argument("--no-compile", action="store_true", help="run without torch.compile")
    return parser.parse_args()


def validation(
    tokenizer: Tokenizer, corpus: data.Corpus, args: argparse.Namespace
) -> tuple[dict, dict, dict]:
    """Validation texts by kind, and their rows at the trunk's and at the MTP stage's length."""
    chats = data.chats(corpus.valid_entries, args.seed * 1000 + 999)
    texts = {**corpus.valid, "chat": chats}
    tok.check_round_trip(tokenizer, [text for some in texts.values() for text in some])
    tokens = {kind: data.encode(tokenizer, some) for kind, some in texts.items()}
    long, short = (
        {kind: data.valid_rows(some, length, 128) for kind, some in tokens.items()}
        for length in (args.length, args.mtp_length)
    )
    return texts, long, short


def train_checkpoint(
    args: argparse.Namespace, corpus: data.Corpus, log: train.Log, threads: train.Threads
) -> None:
    """Run the checkpoint's stages: tokenizer, trunk, MTP, checkpoint, measurements."""
    args.out.mkdir(parents=True, exist_ok=True)
    compiled = not args.no_compile
    chats = data.chats(corpus.train_entries, args.seed * 1000)
    tokenizer = tok.train_tokenizer(corpus.train["docs"] + corpus.train["code"] + chats)
    tok.save_tokenizer(tokenizer, data.TEMPLATE.read_text("utf-8"), args.out)
    texts, valid, valid_short = validation(tokenizer, corpus, args)
    rows = train.Rows(tokenizer, corpus, args.length, args.seed)
    count = sum(map(len, rows.documents))
    log(f"{count} tokens of docs and code, {len(corpus.train_entries)} entries")

    torch.manual_seed(args.seed)
    spec = model.Spec()
    trunk, mtp = model.Trunk(spec), model.Mtp(spec)
    plan = train.Plan(
        "trunk", args.steps, args.batch, args.length, 100, args.decay_steps, args.muon_lr, args.adam_lr
    )
    train.train_trunk(trunk, plan, rows, valid, args.work / "trunk.pt", log, args.resume, threads, compiled)
    # The module learns from the trunk that will be stored, rounding included.
    export.round_to_checkpoint(trunk)
    mtp_plan = train.Plan(
        "mtp",
        args.mtp_steps,
        2 * args.batch,
        args.mtp_length,
        50,
        args.mtp_steps // 5,
        args.muon_lr,
        args.adam_lr,
    )
    short_rows = train.Rows(tokenizer, corpus, args.mtp_length, args.seed + 1)
    train.train_mtp(
        trunk,
        mtp,
        mtp_plan,
        short_rows,
        valid_short,
        args.work / "mtp.pt",
        log,
        args.resume,
        threads,
        compiled,
    )
    export.round_to_checkpoint(mtp)
    export.save(trunk, mtp, args.out)

    torch.compiler.set_stance("force_eager")
    facts = {
        "parameters": sum(p.numel() for m in (trunk, mtp) for p in m.parameters()),
        "epoch_tokens": count + sum(map(len, data.encode(tokenizer, chats))),
        "train_loss": {name: train.last_loss(log.path, name) for name in ("trunk", "mtp")},
    }
    facts |= report.measure(trunk, mtp, tokenizer, corpus, texts, valid, args.out)
    report.write(facts, spec, (plan, mtp_plan), args.out, args.work)
    log(f"wrote {args.out}")


def train_drafters(
    args: argparse.Namespace, corpus: data.Corpus, log: train.Log, threads: train.Threads
) -> None:
    """Run the drafters' stages: the target's texts, training, checkpoints, measurements."""
    tokenizer = Tokenizer.from_file(str(args.out / "tokenizer.json"))
    plan = train.Plan(
        "drafters",
        args.draft_steps,
        args.batch,
        args.draft_length,
        50,
        args.draft_steps // 2,
        args.muon_lr,
        args.adam_lr,
    )
    held_out = draft_data.held_out_prompts(tokenizer, corpus, args.seed)
    texts = args.work / "draft_texts.pt"
    if args.resume and texts.exists():
        written = draft_data.Written(**torch.load(texts, weights_only=False))
    else:
        rows = train.Rows(tokenizer, corpus, args.length, args.seed + 2)
        prompts = draft_data.training_prompts(rows, args.draft_prompts, args.seed)
        written = draft_data.write(args.out, prompts, held_out, plan.length, args.threads, log)
        train.save_state(texts, **vars(written))
    blocks = draft_data.BlockRows(written.documents, plan.length, args.anchors, args.seed)
    valid = {kind: draft_data.evaluation_blocks(ids) for kind, ids in written.held_out.items()}

    torch.manual_seed(args.seed)
    drafters = draft_model.make(load_spec(args.out))
    draft_train.train_drafters(
        export.load_trunk(args.out),
        drafters,
        plan,
        blocks,
        valid,
        args.work / "drafters.pt",
        log,
        args.resume,
        threads,
        not args.no_compile,
    )
    draft_report.write(drafters, args.out, held_out, plan, blocks, args.drafters_out, args.work)
    log(f"wrote {args.drafters_out}")


def main() -> None:
    """Set up, and train what is asked for."""
    args = arguments()
    torch.set_num_threads(args.threads)
    # Compiled kernels must follow a changing thread count; blocks share one code object for all their variants.
    torch._inductor.config.cpp.dynamic_threads = args.share_cpu
    torch._dynamo.config.recompile_limit = 64
    threads = train.Threads(args.threads, args.share_cpu)
    args.work.mkdir(parents=True, exist_ok=True)
    log = train.Log(args.work / "log.txt")
    corpus = data.load_corpus(args.docs or data.fetch_docs())
    stages = {"checkpoint": train_checkpoint, "drafters": train_drafters}
    stages[args.what](args, corpus, log, threads)


if __name__ == "__main__":
    main()
