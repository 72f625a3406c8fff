"""Code in the documentation runs and prints what its comments say."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

IN_A_COROUTINE = """
import asyncio
from lmcache_core import AsyncCache

async def main():
{}
    return got

print(asyncio.run(main()).tokens)
"""
ROOT = Path(__file__).parents[1]


def test_the_embedding_example_runs(tmp_path: Path) -> None:
    text = (ROOT / "docs/embedding.md").read_text()
    whole, coroutine = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    code = whole.replace("/tmp/kv", str(tmp_path / "kv")) + IN_A_COROUTINE.format(textwrap.indent(coroutine, "    "))
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "Lookup(tokens=960, tiers={'cpu': 960}, pending=False)",
        "960 tokens restored; compute the rest",
        "960",
    ]
    assert (tmp_path / "kv").is_dir()
