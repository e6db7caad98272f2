"""Ends well if in a run of pytest all tests were run and at most three failed.

Its argument is the file that has the run's output.
"""

import re
import sys
from pathlib import Path

MOST = 3

text = Path(sys.argv[1]).read_text(errors="replace")
items = re.search(r"workers \[(\d+) items\]", text)
summary = re.findall(r"^=+ (.*\bpassed\b.*) in [\d.]+s.*=+$", text, re.MULTILINE)
if items is None or not summary or "INTERNALERROR" in text:
    sys.exit(1)
found = re.findall(r"(\d+) (passed|failed|skipped|error)", summary[-1])
counts = {word: int(count) for count, word in found}
bad = counts.get("failed", 0) + counts.get("error", 0)  # one that leaves something is both
sys.exit(0 if 0 < bad <= MOST and sum(counts.values()) >= int(items[1]) else 1)
