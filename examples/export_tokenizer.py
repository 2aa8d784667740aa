"""Write a model's tokenizer as files that `transformers` and benchmark clients read.

python examples/export_tokenizer.py FOLDER [--model-path PATH]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from engine.frontend.tokenizer import Tokenizer
from engine.model.source import open_source, resolve_model


def main() -> None:
    """Read the flags, write `tokenizer.json` and `tokenizer_config.json`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model-path")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    Tokenizer.of_source(open_source(resolve_model(arguments.model_path))).export(arguments.folder)
    print(
        f"wrote {', '.join(sorted(path.name for path in arguments.folder.iterdir()))} in {arguments.folder}"
    )


if __name__ == "__main__":
    main()
