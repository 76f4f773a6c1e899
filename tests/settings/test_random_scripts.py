"""Random launch scripts: the reader's words of each command are those of Bash, or it refuses."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from megaindex.errors import InvalidArgument
from megaindex.settings.shell import Script, is_unknown

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")

EXAMPLES = int(os.environ.get("MEGAINDEX_TEST_EXAMPLES", "600"))
RECORDER = (
    'torchrun() { printf "%s\\0" "<" "$@" >> "$OUT"; }; export -f torchrun\nA=x; B=7; C=(1)\n'
)
WORDS = [
    *("x", "7", "--flag", "'s $A'", '"m $A n"', "$1", '"$@"', "$#", "x$By", "$(echo 5)", "{1,2}"),
    *("${A:-d}", '"${B:+y}"', "${C-e}", "${D:=z}", '"${C[@]}"', "${C[@]}", "${C[*]}", "$((B*2))"),
    *("$((C-3))", "${#A}", "${C[1]}", "${B%x}", "`echo 3`", '""', "\\$x", '"${D}"', "$A", "$C"),
    *("~/k", "$'q\\n'", "a*", "[x]", '${D:-"p"}', '"${A}${C[@]}"', "$((A=5))", "${A:?}", "$?"),
    *(
        "${A%x}",
        '"${A#*7}"',
        "${A##x*}",
        "${C%%*1}",
        "${#C[@]}",
        "${#A}",
        "x\\\ny",
        '"x\\\ny"',
        "${B:1}",
    ),
    *(
        '"$(echo "$A" $(echo 1))"',
        "$(( $A + B * 2 - 1 ))",
        "$((7/2%3))",
        "$(echo ')')",
        '"${A:-$B}"',
    ),
    *(
        '"x${C[@]}y"',
        '"$A$@"',
        '"$*"',
        "${C[@]:1}",
        "${A/x/y}",
        "$'a b'",
        '"\\$A \\x"',
        "a#b",
        "${D?}",
    ),
    *('${D:-""}', '"${D:-""}"', '${A:+""}', "$((RANDOM * 0 + 4 / B))", "$((B % RANDOM))"),
]
SIMPLE = [
    *("N=W", "N=WW", "N+=W", "N=(W W)", "N+=(W)", "export N=W", "torchrun W W", "false W", "shift"),
    *("set -- W W", "unset N", "let N=4", "((N=5))", "printf -v N %s W", "N[1]=W", "eval N=W"),
    *("read N <<< W", "(N=W; torchrun W)", "declare N=W", "echo W | torchrun W", "N=W torchrun W"),
    *(
        "torchrun W &\nwait",
        "IFS=x",
        "N=W true",
        "echo $((N=6)) > /dev/null",
        "g() { S; }",
        "g",
        "cd /",
    ),
    *(
        "eval N=W",
        'eval "torchrun W $A"',
        "CMD='torchrun W $A W'; eval $CMD",
        "export N=W N=W",
        "unset N",
    ),
    *(
        "cat > /dev/null <<X\n$N W\nX",
        "declare -a N=(W)",
        "N=(W W) # c",
        "exec > /dev/null",
        "exit",
        "return",
    ),
    *("[ -f /no ] || exit 1", "local N=W", "source ./no.sh", "trap 'N=1' EXIT", "N=$(false)"),
    *("printf '=%s' W > /dev/null", "export N=W\nbash -c 'torchrun $A $B ${C[@]} $# $1'"),
    *("bash -c 'A=5; set -u; torchrun $A; exit 3'", 'X=3 bash -c "torchrun $N \\$N"', "export N"),
]
TESTS = [
    *("[ W = W ]", "[[ W == W ]]", '[ -z "W" ]', "[[ -n W && W != x* ]]", '[ "W" -gt 3 ]', "true"),
    *(
        "((N>2))",
        "grep -q x /dev/null",
        "false",
        "[ -f /no ]",
        "! true",
        "[ $D != W ]",
        '[ "$D" != W ]',
        "[ W = $D ]",
        "[ -n $D ]",
        "[ ! -z $D ]",
        "false W",
        "[ $# -gt 1 ]",
    ),
]
COMPOUND = [
    *("T && S", "T || S", "T && S || S", "if T; then\nS\nfi", "if T; then S; S; else\nS\nfi"),
    *("if T; then S\nelif T; then S\nelse S; fi", "for N in W W 9; do\nS; S\ndone"),
    *("for N in W 8; do T && break; S; done", "while T; do S; break; done", "{ S; S; } 2>&1"),
    *("case W in x|7) S ;;\n*) S; S ;;\nesac", "until T; do S; break; done", "f() {\nS\nS\n}"),
    *("f() { T && return; S; }", "# comment \\\nS", "cat <<E > /dev/null\n$N\nE", "S &\nwait"),
    *("while read N; do S; done <<< W", "for N; do S; done", "for ((;;)); do S; break; done"),
]


def filled(draw: random.Random, text: str, depth: int = 0) -> str:
    """Return a template with W, N, S and T replaced, by words, names, statements and tests."""
    found = []
    for place, char in enumerate(text):
        beside = text[max(place - 1, 0) : place] + text[place + 1 : place + 2]
        alone = not any(one.isalnum() and one not in "WN" for one in beside)
        if char == "N" and alone:
            found.append(draw.choice("ABCD"))
        elif char == "W" and alone:
            word = draw.choice(WORDS)
            found.append(word.strip("\"'") if text[place - 1 : place] == '"' else word)
        elif char in "ST" and alone:
            deep = char == "S" and depth < 3 and draw.random() < 0.3
            kind = TESTS if char == "T" else COMPOUND if deep else SIMPLE
            found.append(filled(draw, draw.choice(kind), depth + 1))
        else:
            found.append(char)
    return "".join(found)


def script(draw: random.Random) -> str:
    counts = draw.choice([1, 1, 2, 3, 5])
    body = "\n".join(
        filled(draw, draw.choice(SIMPLE + COMPOUND * (draw.random() < 0.5))) for _ in range(counts)
    )
    return RECORDER + body + filled(draw, "\ntorchrun last W W\n")


def by_bash(text: str, words: list[str], folder: Path) -> list[str]:
    out, path = folder / "out", folder / "launch.sh"
    out.write_text("")
    path.write_text(text)
    environment = {"OUT": str(out), "HOME": "/h", "PATH": os.environ["PATH"]}
    subprocess.run(
        ["bash", str(path), *words], env=environment, cwd=folder, timeout=20, check=False,
        stdin=subprocess.DEVNULL, capture_output=True,
    )  # fmt: skip
    return out.read_text(errors="surrogateescape").split("\0")[:-1]


def by_reader(text: str, words: list[str]) -> list[str] | None:
    """Return the words of every torchrun; None if one of them is unknown."""
    text = text.partition("\n")[2]  # torchrun is a program
    try:
        found = Script(text, {"HOME": "/h", "PATH": os.environ["PATH"]}, words)
    except InvalidArgument:
        return None
    calls = [one.words for one in found.commands if one.words[0] == "torchrun"]
    flat = [word for one in calls for word in ("<", *one[1:])]
    strange = any(
        is_unknown(one.words[0]) or one.assumed or one.words[0] == "bash" for one in found.commands
    )
    return None if strange or any(is_unknown(word) for word in flat) else flat


def test_random_scripts_are_read_as_bash_reads_them_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    draw, equal = random.Random(int(os.environ.get("MEGAINDEX_TEST_SEED", "7"))), 0
    for _ in range(EXAMPLES):
        text = script(draw)
        words = draw.choice([[], ["x", "2"], ["7", "a b", "--flag"]])
        found = by_reader(text, words)
        if found is not None:
            assert found == by_bash(text, words, tmp_path), text
            equal += 1
    assert equal > EXAMPLES // 30
