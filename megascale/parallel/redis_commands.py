"""What a store asks of a Redis server: its scripts and commands as data (MegaScale 3.5).

    P:values    hash: the store's keys
    P:wait:KEY  stream: somebody waits, or has waited, for KEY; each change of KEY adds an entry
    P:queue:KEY list: the queue of that name
    P:ranks     hash: which ranks have opened this store, the size of their world, how many closed
    P:done      hash: the last change that each connection made, with its result

P names one start of one run. Every call is one command, and a script where it has to be atomic.

A wait blocks on the server and nobody polls: a script that finds a key missing answers with the
newest entry of the key's stream, and XREAD BLOCK waits for one behind it. What is set between the
two is behind it too, so no waking is lost; all who wait for a key are released by one entry; and a
key that nobody waits for costs its setter one look-up. A stream lives as long as its longest wait.

A change that is no repetition of itself (`add`, `append`, ...) leaves its result under the name of
its connection. One that is sent again, because the connection broke before its answer came, is
found there and not made twice.

This file needs neither redis-py nor torch, so that who measures a server with clients of his own
sends what `RedisStore` sends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Argument = str | bytes | int
LIFETIME_S = 7 * 24 * 3600  # of what a run leaves behind that nobody touches any more
_SPARE_MS = 60_000  # a stream outlives its longest wait by this

_NAMES = """
local run = KEYS[1]
local values, ranks, done = run .. ':values', run .. ':ranks', run .. ':done'
local function wait_of(key) return run .. ':wait:' .. key end
local function queue_of(key) return run .. ':queue:' .. key end
"""
# What a script uses of these stands before it: a function costs a microsecond where it is not used.
_IS_THERE = """
local function is_there(key)
  return redis.call('HEXISTS', values, key) == 1 or redis.call('EXISTS', queue_of(key)) == 1
end
"""
_NEWEST = """
local function newest(key, keep_ms)
  local stream = wait_of(key)
  local last = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1]
  local id = last and last[1] or redis.call('XADD', stream, '*', 'n', '')
  if redis.call('PTTL', stream) < keep_ms then redis.call('PEXPIRE', stream, keep_ms) end
  return id
end
"""
_WAKE = """
local function wake(key)
  local stream = wait_of(key)
  if redis.call('EXISTS', stream) == 1 then
    redis.call('XADD', stream, 'MAXLEN', 1, '*', 'n', '')
  end
end
"""
# ARGV of every change: connection, its number, whether it may have been made already, then its own.
_ONCE = """
if ARGV[3] == '1' then
  local last = redis.call('HGET', done, ARGV[1])
  if last then
    last = cmsgpack.unpack(last)
    if last[1] == ARGV[2] then return last[2] end
  end
end
local function once(result)
  redis.call('HSET', done, ARGV[1], cmsgpack.pack({ARGV[2], result}))
  return result
end
"""


@dataclass(frozen=True)
class Script:
    """A Lua script; `sha` is how the server knows it once it has seen it."""

    text: str

    @property
    def sha(self) -> str:
        return hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


def _reads(text: str) -> Script:
    helpers = {"is_there(": _IS_THERE, "newest(": _NEWEST, "wake(": _WAKE}
    used = [helper for name, helper in helpers.items() if name in text]
    return Script("".join([_NAMES, *used, text]))


def _changes(text: str) -> Script:
    return _reads(_ONCE + text)


SCRIPTS: Mapping[str, Script] = {
    # rank, opener, world size, lifetime -> what another one holds there already, or nothing
    "open": _reads("""
local world = redis.call('HGET', ranks, 'world')
if world and world ~= ARGV[3] then return 'world ' .. world end
local holder = redis.call('HGET', ranks, ARGV[1])
if holder and holder ~= ARGV[2] then return 'rank' end
redis.call('HSET', ranks, 'world', ARGV[3], ARGV[1], ARGV[2])
redis.call('HSETNX', values, '\\0', '')
redis.call('HSETNX', done, '\\0', '')
for _, name in ipairs({ranks, values, done}) do redis.call('EXPIRE', name, ARGV[4]) end
return ''
"""),
    # rank, opener, lifetime -> 1 where the server still knows this opener
    "touch": _reads("""
if redis.call('HGET', ranks, ARGV[1]) ~= ARGV[2] then return 0 end
for _, name in ipairs({ranks, values, done}) do redis.call('EXPIRE', name, ARGV[3]) end
return 1
"""),
    # the last of the world to close takes everything along
    "close": _reads("""
if redis.call('HGET', ranks, ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('HSET', ranks, ARGV[1], 'closed ' .. ARGV[2])
if redis.call('HINCRBY', ranks, 'closed', 1) < tonumber(redis.call('HGET', ranks, 'world')) then
  return 0
end
redis.call('UNLINK', ranks, values, done)
return 1
"""),
    "set": _reads("""
for i = 1, #ARGV, 2 do
  redis.call('HSET', values, ARGV[i], ARGV[i + 1])
  wake(ARGV[i])
end
return 1
"""),
    # milliseconds, key -> its value, or {the entry to wait behind}
    "get": _reads("""
local value = redis.call('HGET', values, ARGV[2])
if value then return value end
return {newest(ARGV[2], tonumber(ARGV[1]))}
"""),
    # milliseconds, keys -> {values, {}}, or {{}, {the last missing key, the entry to wait behind}}
    "multi_get": _reads("""
local found = {}
for first = 2, #ARGV, 1000 do
  local last = math.min(first + 999, #ARGV)
  local part = redis.call('HMGET', values, unpack(ARGV, first, last))
  for i = last - first + 1, 1, -1 do
    local key = ARGV[first + i - 1]
    if not part[i] then return {{}, {key, newest(key, tonumber(ARGV[1]))}} end
    found[first + i - 2] = part[i]
  end
end
return {found, {}}
"""),
    # milliseconds, keys -> {missing key, the entry to wait behind, ...}
    "wait": _reads("""
local missing = {}
for i = 2, #ARGV do
  if not is_there(ARGV[i]) then
    missing[#missing + 1] = ARGV[i]
    missing[#missing + 1] = newest(ARGV[i], tonumber(ARGV[1]))
  end
end
return missing
"""),
    # missing key, the entry to wait behind, ... -> those of the pairs that nothing has come behind
    "unchanged": _reads("""
local left = {}
for i = 1, #ARGV, 2 do
  local last = redis.call('XREVRANGE', wait_of(ARGV[i]), '+', '-', 'COUNT', 1)[1]
  if last and last[1] == ARGV[i + 1] then
    left[#left + 1] = ARGV[i]
    left[#left + 1] = ARGV[i + 1]
  end
end
return left
"""),
    # keys -> those that are missing
    "missing": _reads("""
local missing = {}
for i = 1, #ARGV do
  if not is_there(ARGV[i]) then missing[#missing + 1] = ARGV[i] end
end
return missing
"""),
    "count": _reads("return redis.call('HLEN', values) - redis.call('HEXISTS', values, '\\0')"),
    "list": _reads("return redis.call('HKEYS', values)"),
    "queue_len": _reads("return redis.call('LLEN', queue_of(ARGV[1]))"),
    # Lua counts in doubles: beyond 2^53 the digits are read from the hash
    "add": _changes("""
local sum = redis.call('HINCRBY', values, ARGV[4], ARGV[5])
if math.abs(sum) >= 9007199254740992 then sum = redis.call('HGET', values, ARGV[4]) end
wake(ARGV[4])
return once(sum)
"""),
    "append": _changes("""
local before = redis.call('HGET', values, ARGV[4]) or ''
redis.call('HSET', values, ARGV[4], before .. ARGV[5])
wake(ARGV[4])
return once(1)
"""),
    # key, expected, desired -> what is there now; of a missing key `expected`, unless that is empty
    "compare_set": _changes("""
local value = redis.call('HGET', values, ARGV[4])
if value ~= ARGV[5] and (value or ARGV[5] ~= '') then return once(value or ARGV[5]) end
redis.call('HSET', values, ARGV[4], ARGV[6])
wake(ARGV[4])
return once(ARGV[6])
"""),
    "delete": _changes("""
return once(redis.call('HDEL', values, ARGV[4]) + redis.call('UNLINK', queue_of(ARGV[4])))
"""),
    "queue_push": _changes("""
redis.call('RPUSH', queue_of(ARGV[4]), ARGV[5])
wake(ARGV[4])
return once(1)
"""),
    # key, milliseconds -> its first value, or {the entry to wait behind}
    "queue_pop": _changes("""
local value = redis.call('LPOP', queue_of(ARGV[4]))
if value then return once(value) end
return {newest(ARGV[4], tonumber(ARGV[5]))}
"""),
}


def run_prefix(start: str) -> str:
    """How the names of one start's keys begin."""
    return f"megascale:store:{start}"


def keep_ms(wait_s: float) -> int:
    """How long a stream must live for a wait of `wait_s`."""
    return int(wait_s * 1000) + _SPARE_MS


def script_command(prefix: str, name: str, *arguments: Argument) -> list[Argument]:
    """The script by its hash, which a server answers with NOSCRIPT before it has seen it."""
    return ["EVALSHA", SCRIPTS[name].sha, 1, prefix, *arguments]


def in_full(command: Sequence[Argument], name: str) -> list[Argument]:
    """The same command with the script itself: what a server that does not know it is sent."""
    return ["EVAL", SCRIPTS[name].text, *command[2:]]


def read_command(prefix: str, key: str) -> list[Argument]:
    """A value without waiting for it, or None: what `add` of nothing needs of a key that is there,
    as torch's barrier asks for it again and again."""
    return ["HGET", f"{prefix}:values", key]


def block_command(prefix: str, key: str | bytes, entry: bytes, wait_s: float) -> list[Argument]:
    """Wait on the server for an entry of the key's stream behind `entry`; None after `wait_s`."""
    name = key if isinstance(key, bytes) else key.encode()
    stream = f"{prefix}:wait:".encode() + name
    return ["XREAD", "COUNT", 1, "BLOCK", max(1, int(wait_s * 1000)), "STREAMS", stream, entry]
