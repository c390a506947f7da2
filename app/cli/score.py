"""The subcommands `tokenize` and `perplexity`."""

from __future__ import annotations

import argparse
from dataclasses import asdict

import engine  # its model reader is imported on first use
from app.cli.arguments import add_json, add_model
from app.cli.load_options import add_load, model_path
from app.cli.loading import load, note_warnings
from app.cli.output import fallback_fields, note_progress, table, write, write_json
from app.cli.talk import add_prompt, prompt_of, read_text

PUBLISHED_CONTEXT = 512  # context length for most published perplexities


def add_perplexity(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("file", metavar="FILE", help="a UTF-8 text file")
    add_load(parser)
    add_json(parser)


def run_perplexity(args: argparse.Namespace) -> None:
    text = read_text(args.file)
    if args.ctx is None and args.plan is None:
        trained = engine.read_model_info(model_path(args.model)).n_ctx_train
        args.ctx = min(PUBLISHED_CONTEXT, trained) if trained > 0 else PUBLISHED_CONTEXT
    with load(args) as model:
        known = model.warnings
        result = engine.perplexity(model, model.tokenizer.encode(text), _show)
        note_warnings(model, known)
        fallbacks = fallback_fields(model.fallbacks)
    if args.json:
        write_json({**asdict(result), "fallbacks": fallbacks})
    else:
        write(
            f"perplexity {result.perplexity:.4f} ± {result.error:.4f} "
            f"({result.n_scored} tokens in {result.n_chunks} chunks)"
        )


def _show(done: int, total: int) -> None:
    note_progress(f"{done}/{total} chunks" if done < total else "")


def add_tokenize(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_prompt(parser)
    parser.add_argument("--bare", action="store_true", help="do not add BOS or EOS")
    parser.add_argument("--plain", action="store_true", help="treat special tokens as plain text")
    add_json(parser)


def run_tokenize(args: argparse.Namespace) -> None:
    text, tokenizer = prompt_of(args), engine.load_tokenizer(model_path(args.model))
    ids = tokenizer.encode(text, add_special=not args.bare, parse_special=not args.plain)
    pieces = [tokenizer.token_bytes(token) for token in ids]
    if args.json:
        write_json({"ids": ids, "pieces": [list(piece) for piece in pieces]})
        return
    rows = [(str(token), _shown(piece)) for token, piece in zip(ids, pieces, strict=True)]
    write(table(("id", "text"), rows, frozenset({0})))


def _shown(piece: bytes) -> str:
    try:
        return repr(piece.decode())
    except UnicodeDecodeError:
        return repr(piece)
