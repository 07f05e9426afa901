#!/usr/bin/env bash
# Builds the native module with sanitizers and runs the native tests against it:  sanitize.sh PYTHON
# Address and undefined behaviour together, then threads.  Builds lie in build/sanitize-*.  Needs GCC.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
export PATH="$(dirname "$python"):$PATH"
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
nanobind=$("$python" -m nanobind --cmake_dir)
compiler=${CXX:-g++}

# build_with SANITIZERS FOLDER FLAGS: a package `topg` in FOLDER/site whose native module is instrumented
build_with() {
  cmake -S . -B "$2" -G Ninja -DCMAKE_BUILD_TYPE=Sanitize -DCMAKE_CXX_FLAGS_SANITIZE="-O1 $3" -DTOPG_SANITIZE="$1" \
    -Dnanobind_DIR="$nanobind" -DPython_EXECUTABLE="$python" -DCMAKE_CXX_COMPILER="$compiler" >/dev/null
  cmake --build "$2"
  rm -rf "$2/site" && mkdir -p "$2/site/topg"
  ln -s "$PWD"/src/topg/* "$2/site/topg/"
  cp "$2"/_native*.so "$2/site/topg/"
}

# run_with LIBRARY FOLDER TESTS...: -S keeps the installed package, which is not instrumented, out of the way
run_with() {
  env LD_PRELOAD="$("$compiler" -print-file-name="$1")" PYTHONPATH="$2/site:$packages" OPENBLAS_NUM_THREADS=1 \
    setarch -R "$python" -S -m pytest -q -o pythonpath=tests -p no:cacheprovider -m "not slow and not model" \
    --ignore tests/native/test_disassembly.py "${@:3}"
}

export ASAN_OPTIONS=detect_leaks=0  # the interpreter itself leaks at exit
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
export TSAN_OPTIONS=halt_on_error=1

# Kernels are so unrolled that some checks have to go, and others to be calls: they would compile for ten minutes.
build_with address,undefined build/sanitize-address "-fno-sanitize=null,alignment,object-size,pointer-overflow \
  -fno-sanitize-address-use-after-scope --param asan-instrumentation-with-call-threshold=0"
run_with libasan.so build/sanitize-address tests/native
build_with thread build/sanitize-thread ""
run_with libtsan.so build/sanitize-thread tests/native/test_runtime.py tests/native/test_engine.py
echo "sanitizers: nothing found"
