"""The store on disk: damage, directories that cannot be written, limits, and two processes."""

import os
import threading
import time
from pathlib import Path

import pytest

from forks import Forks
from treadle.runtime.info import facts
from treadle.runtime.kernels import compilers
from treadle.runtime.kernels.compilers import compile_cpp, find_cxx, load_functions
from treadle.runtime.store import cache as caches
from treadle.runtime.store.cache import Cache, content_key
from treadle.util.errors import RuntimeFailure

TEXT = """#include <cstdint>
extern "C" void f(void* const* p, const int64_t* sizes, int64_t instances) {
  *(int64_t*)p[0] = sizes[0] + instances;
}
"""
needs_compiler = pytest.mark.skipif(find_cxx() is None, reason="no C++ compiler")


def entries(root: Path) -> list[Path]:
    return [path for path in root.glob("[0-9a-f][0-9a-f]/*") if path.is_file()]


def test_key_depends_on_where_the_parts_end() -> None:
    assert content_key("ab", "c") != content_key("a", "bc")
    assert content_key("ab", b"c") == content_key(b"ab", "c")


@pytest.mark.parametrize("size", [0, 1, 10_000])
def test_what_goes_in_comes_out(tmp_path: Path, size: int) -> None:
    payload = os.urandom(size)
    key = content_key(payload)
    assert Cache(tmp_path).get(key) is None
    Cache(tmp_path).put(key, payload)
    assert Cache(tmp_path).get(key) == payload
    assert len(entries(tmp_path)) == 1  # no temporary file stays


@pytest.mark.parametrize("damage", ["truncate", "empty", "flip", "foreign"])
def test_a_damaged_entry_is_missing(tmp_path: Path, damage: str) -> None:
    cache, key = Cache(tmp_path), content_key("k")
    cache.put(key, b"payload" * 100)
    (entry,) = entries(tmp_path)
    data = entry.read_bytes()
    broken = {
        "truncate": data[:-1],
        "empty": b"",
        "flip": bytes([data[0] ^ 1]) + data[1:],
        "foreign": b"something else",
    }
    entry.write_bytes(broken[damage])
    assert cache.get(key) is None
    cache.put(key, b"again")
    assert cache.get(key) == b"again"


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")  # a mode would not stop a root user
    cache, key = Cache(blocked / "cache"), content_key("k")
    with pytest.warns(RuntimeWarning, match="cannot be written"):
        cache.put(key, b"value")
    assert cache.get(key) == b"value"
    assert not cache.writable
    private = cache.path(key, "")
    assert private is not None
    with cache.lock(key):
        cache.put(key, b"other")
    assert cache.get(key) == b"other"
    del cache
    assert not private.exists()


def test_limit_evicts_the_least_recently_used(tmp_path: Path) -> None:
    cache = Cache(tmp_path, limit_bytes=3500)
    keys = [content_key(str(i)) for i in range(5)]
    for age, key in enumerate(keys[:3]):
        cache.put(key, bytes(1000))
        path = cache.path(key, "")
        assert path is not None
        os.utime(path, (1000 + age, 1000 + age))
    assert cache.get(keys[0])  # used just now
    cache.put(keys[3], bytes(1000))
    assert [cache.get(k) is not None for k in keys[:4]] == [True, False, True, True]
    cache.put(keys[4], bytes(9000))  # larger than the limit: still kept, alone
    assert [cache.get(k) is not None for k in keys] == [False] * 4 + [True]


def test_remains_of_a_killed_writer_go(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.put(content_key("a"), b"1")
    remains = entries(tmp_path)[0].parent / ".partial-x"
    remains.write_bytes(b"half")
    cache.put(content_key("b"), b"2")
    assert remains.exists()  # it may still be written
    os.utime(remains, (1000, 1000))
    for number in range(1000):  # some of them look
        cache.put(content_key(str(number)), b"3")
    assert not remains.exists()


def test_many_small_entries_stay_near_the_limit(tmp_path: Path, monkeypatch) -> None:
    looks: list[int] = []
    original = caches._entries
    monkeypatch.setattr(caches, "_entries", lambda *of: looks.append(1) or original(*of))
    cache = Cache(tmp_path, limit_bytes=20_000)
    keys = [content_key(str(number)) for number in range(800)]
    for key in keys:
        cache.put(key, bytes(10))
    assert len(looks) < 100
    assert cache.size() < 1.25 * cache.limit_bytes
    assert cache.get(keys[-1]) is not None


def test_far_from_the_limit_few_entries_look_at_all_others(tmp_path: Path, monkeypatch) -> None:
    looks: list[int] = []
    original = caches._entries
    monkeypatch.setattr(caches, "_entries", lambda *of: looks.append(len(of)) or original(*of))
    cache = Cache(tmp_path, limit_bytes=1 << 30)
    for number in range(800):
        cache.put(content_key(str(number)), bytes(10))
    assert 0 < looks.count(1) < 10
    assert looks.count(2) < 100  # at one folder


def call(path: Path) -> int:
    import ctypes

    value = ctypes.c_int64()
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(value))
    sizes = (ctypes.c_int64 * 1)(40)
    function = load_functions(path, ("f",))["f"]
    function(ctypes.addressof(pointers), ctypes.addressof(sizes), 2)
    return value.value


@needs_compiler
def test_compiles_once_and_rebuilds_what_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, cache, runs = find_cxx(), Cache(tmp_path), []
    assert compiler is not None
    real = compilers._compile
    monkeypatch.setattr(compilers, "_compile", lambda *a: runs.append(1) or real(*a))
    other = TEXT.replace("instances;", "instances + 1;")
    first = compile_cpp([TEXT, other], cache, compiler)
    assert [call(path) for path in first] == [42, 43]
    assert compile_cpp([TEXT, other], cache, compiler) == first
    assert len(runs) == 2
    damaged = first[0].with_suffix(".copy")
    damaged.write_bytes(first[0].read_bytes()[:500])
    os.replace(damaged, first[0])  # a new inode: the loaded library stays mapped
    again = compile_cpp([TEXT], cache, compiler)
    assert len(runs) == 3
    assert call(again[0]) == 42


@needs_compiler
def test_sources_that_cannot_be_written_are_said_to_be_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, file = find_cxx(), tmp_path / "file"
    assert compiler is not None
    file.write_text("no directory can be made below it")
    monkeypatch.setattr("tempfile.tempdir", str(file))
    text = TEXT.replace("instances;", "instances + 3;")
    with pytest.raises(RuntimeFailure, match=r"TR-404.*temporary directory(.|\n)*TMPDIR"):
        compile_cpp([text], Cache(tmp_path / "cache"), compiler)


def test_without_any_directory_the_cache_says_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("no directory can be made below it")
    monkeypatch.setattr("tempfile.tempdir", str(file))
    with pytest.raises(RuntimeFailure, match=r"TR-404(.|\n)*TREADLE_CACHE_DIR"):
        Cache(file / "cache").put(content_key("a"), b"payload")


@needs_compiler
def test_wrong_text_shows_what_the_compiler_said(tmp_path: Path) -> None:
    compiler = find_cxx()
    assert compiler is not None
    with pytest.raises(RuntimeFailure, match=r"TR-402(.|\n)*no_such_type"):
        compile_cpp(["no_such_type x;"], Cache(tmp_path), compiler)
    with pytest.raises(RuntimeFailure, match="cannot load"):
        load_functions(compile_cpp([TEXT], Cache(tmp_path), compiler)[0], ("g",))


@needs_compiler
def test_two_processes_compile_the_same_text_once(tmp_path: Path, forks: Forks) -> None:
    program = f"""
        import sys, time
        from pathlib import Path
        from treadle.runtime.kernels import compilers
        from treadle.runtime.store.cache import Cache
        folder, ready, other = map(Path, sys.argv[1:])
        compiler, real = compilers.find_cxx(), compilers._compile
        def slow(*args):
            print("compiled", flush=True)
            time.sleep(1)
            return real(*args)
        compilers._compile = slow
        ready.touch()
        while not other.exists():
            time.sleep(0.001)
        print(compilers.compile_cpp([{TEXT!r}], Cache(folder), compiler)[0])
    """
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    cache = str(tmp_path / "cache")
    pair = [forks.start(program, cache, *each) for each in ((one, two), (two, one))]
    done = [forks.finish(each, 60) for each in pair]
    assert [each.returncode for each in done] == [0, 0], done
    outputs = " ".join(each.stdout for each in done).split()
    assert outputs.count("compiled") == 1
    assert len({line for line in outputs if line.endswith(".so")}) == 1


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A line for each time that compilers are tried."""
    lines: list[str] = []
    real = compilers.find_cxx
    monkeypatch.setattr(compilers, "find_cxx", lambda name: lines.append(name) or real(name))
    return lines


@needs_compiler
def test_the_compiler_is_tried_once_for_all_processes(tmp_path: Path, asked: list[str]) -> None:
    if not compilers._probe_key([str(find_cxx().path)]):
        pytest.skip("the compiler is a script")
    first = compilers.remembered_cxx(Cache(tmp_path))
    assert first == find_cxx()
    assert compilers.remembered_cxx(Cache(tmp_path)) == first
    assert len(asked) == 1


@needs_compiler
@pytest.mark.parametrize("name", ["LIBRARY_PATH", "COMPILER_PATH"])
def test_it_is_tried_again_where_it_may_find_other_parts(
    tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    compilers.remembered_cxx(Cache(tmp_path))
    monkeypatch.setenv(name, str(tmp_path))
    compilers.remembered_cxx(Cache(tmp_path))
    assert len(asked) == 2


def test_a_script_is_tried_each_time(
    tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "g++").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for _ in range(2):
        compilers.remembered_cxx(Cache(tmp_path / "cache"))
    assert len(asked) == 2
    assert not (tmp_path / "cache").exists()


@needs_compiler
def test_where_nothing_can_be_written_it_is_tried_without_a_word(
    tmp_path: Path, asked: list[str]
) -> None:
    (tmp_path / "file").write_text("")
    for _ in range(2):  # warnings are errors
        assert compilers.remembered_cxx(Cache(tmp_path / "file")) == find_cxx()
    assert len(asked) == 2


def test_no_compiler_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compilers.find_cxx.__wrapped__("") is None
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    assert compilers.find_cxx.__wrapped__("") is None


def test_facts(tmp_path: Path) -> None:
    shown = facts(tmp_path / "new")
    assert "works" in shown["cache"]
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert "cannot be written" in facts(blocked)["cache"]
    assert all(isinstance(value, str) and value for value in shown.values())


def test_a_lock_that_is_never_released_is_not_waited_for(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(caches, "_LONGEST_WAIT", 0.1)
    key, served = content_key("k"), []
    with Cache(tmp_path).lock(key):

        def work() -> None:
            with Cache(tmp_path).lock(key):
                served.append(key)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert served == [key]


def test_lock_is_exclusive(tmp_path: Path) -> None:
    import threading

    key, order = content_key("k"), []

    def second() -> None:
        with Cache(tmp_path).lock(key):
            order.append("second")

    with Cache(tmp_path).lock(key):
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.2)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
