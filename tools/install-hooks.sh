#!/usr/bin/env bash
# Install the commit hook that runs `make check`. An existing hook is kept and reported.
set -euo pipefail
cd "$(dirname "$0")/.."
hook=$(git rev-parse --git-path hooks)/pre-commit
line='exec make check'

if [ -e "$hook" ] && ! grep -qx "$line" "$hook"; then
    echo "$hook exists and is not ours; add a line '$line' to it, or remove it" >&2
    exit 1
fi
mkdir -p "$(dirname "$hook")"
printf '#!/bin/sh\n# Installed by tools/install-hooks.sh\n%s\n' "$line" > "$hook"
chmod +x "$hook"
echo "installed $hook"
