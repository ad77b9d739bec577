"""Write the tuned lists of recorded sweeps into configs/tuned/.

    python benchmarks/make_tuned.py [SWEEP.parquet …]

Without arguments, those of every measured sweep in sweeps/. A list that exists is replaced.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flashtune.shortlist import recommend_for  # noqa: E402
from flashtune.store import find, read  # noqa: E402
from flashtune.tuned import as_toml, from_sweep  # noqa: E402


def main(paths: list[Path]) -> None:
    folder = ROOT / "configs" / "tuned"
    folder.mkdir(exist_ok=True)
    for path in paths:
        file = read(path)
        if not file.provenance.measured:
            print(f"{path}: nothing was measured, skipped")
            continue
        tuned = from_sweep(file, recommend_for([file]))
        (folder / tuned.file_name).write_text(as_toml(tuned), encoding="utf-8")
        print(f"{path} -> {folder / tuned.file_name}")


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]] or find(ROOT / "sweeps"))
