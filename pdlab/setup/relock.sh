#!/usr/bin/env bash
# Makes cpu.lock, cuda.lock and recorded.lock anew from pyproject.toml. Needs uv. Where no index offers the +cpu build of torch,
# UV_FIND_LINKS names a folder that holds its wheel; otherwise uv looks at PyTorch's own CPU index.
set -euo pipefail
cd "$(dirname "$0")/../.."

lock() { # profile, further arguments of uv
  local profile=$1
  shift
  {
    echo "# Made by pdlab/setup/relock.sh from pyproject.toml (extras $profile and test): Linux, x86_64, Python 3.11 to 3.13."
    echo "# Complete: install it with --no-deps. What $profile.overrides names is left out or replaced on purpose."
    # Every line carries the marker of the one platform that was resolved for: it says nothing here.
    uv pip compile pyproject.toml --extra "$profile" --extra test --group build --group model --universal \
      --python-version 3.11 --override "pdlab/setup/$profile.overrides" --no-annotate --no-header --quiet "$@" |
      sed -E "s/ and platform_machine == 'x86_64' and platform_python_implementation == 'CPython' and sys_platform == 'linux'$//
              s/ ; python_full_version < '3\.14'$//; s/ and python_full_version < '3\.14'$//"
  } >"pdlab/setup/$profile.lock.new"
  mv "pdlab/setup/$profile.lock.new" "pdlab/setup/$profile.lock"
}

lock_recorded() { # without engines, for any platform: [tool.uv] is for those with engines, hence --no-config
  {
    echo "# Made by pdlab/setup/relock.sh from pyproject.toml (extra test) and cpu.lock: any platform, Python 3.11 to 3.13."
    echo "# Complete: install it with --no-deps. What cpu.lock has too is of the same version: outputs are compared."
    uv pip compile pyproject.toml --no-config --extra test --group build --universal --python-version 3.11 \
      --constraint pdlab/setup/cpu.lock --no-annotate --no-header --quiet
  } >pdlab/setup/recorded.lock.new
  mv pdlab/setup/recorded.lock.new pdlab/setup/recorded.lock
}

if [ -n "${UV_FIND_LINKS:-}" ]; then lock cpu; else lock cpu --torch-backend cpu; fi
env -u UV_FIND_LINKS bash -c "$(declare -f lock); set -euo pipefail; lock cuda"
lock_recorded
