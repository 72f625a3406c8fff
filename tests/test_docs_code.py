"""Code in the documentation runs and prints what its comments say."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_embedding_example_runs(tmp_path: Path) -> None:
    text = (ROOT / "docs/embedding.md").read_text()
    found = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert found is not None
    code = found[1].replace("/tmp/kv", str(tmp_path / "kv"))
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "Lookup(tokens=960, tiers={'cpu': 960}, pending=False)",
        "960 tokens restored; compute the rest",
    ]
    assert (tmp_path / "kv").is_dir()
