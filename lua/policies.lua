#!lua
--[[ policies: change the stored policies by a list of changes, all of them or none (P6).
KEYS[1]   reply         string, this call's reply, kept so that a repeat changes nothing
KEYS[2]   current       hash: 'revision' to the number of the last change and the name of the store's life, and each
                        entry to its own revision, '@' and its owner if it has one, a space, and its text
KEYS[3]   audit         list of what was changed, newest first, as entries: revision, when_us, action, who, entry,
                        before, after, owner
KEYS[4..] histories     for each change a list of the same for its own entry; expires 90 days after the entry is deleted
ARGV[1]   head          now_us (0 = server clock; only tests send one), expires_us (0 = never), number of changes
ARGV[2]   origin        expected revision of the whole (-1 = any), action, name for the store's life, who, owner
ARGV[3]   changes       for each: expected revision (-1 = any, 0 = must not exist), entry, text ('' = delete it)
ARGV[4]   channel       the channel on which the new revision is published
RETURNS   one string: done or expired, now_us, status, revision, number of the change that was refused (from 0) and
          the revision it found, which is also returned if nothing had to change; see
          limiter/store/policies/policy_layout.py
HOLDS     a repeated call changes nothing; a refusal changes nothing; an entry put unchanged is not written;
          revisions only grow, and each belongs to one call; deleting a missing entry is refused; moving an
          entry to another name is not logged ]]

local now_us, expires_us, count = struct.unpack('<ddH', ARGV[1])
local read_count = 1
-- #include lib/begin.lua
-- #include lib/record.lua
-- #include lib/call.lua

local BEFORE = 3  -- keys before the histories
local APPLIED, CONFLICT, MISSING, FULL, STALE = 1, 2, 3, 4, 5
local ANY, MOVE = -1, 5
local AUDIT_MAX, HISTORY_MAX, ENTRIES_MAX = 10000, 50, 20000
local DELETED_HISTORY_S = 7776000  -- 90 days

local expected, action, life, who, owner = unpack_struct('<dBBc0Hc0Hc0', ARGV[2])

-- The revision of the whole, and the name of this life of the store. A damaged field counts as missing.
local revision = 0
local standing = call('HGET', KEYS[2], 'revision')
if standing then
  local number, name = string.match(standing, '^(%d+) (.*)$')
  if number then revision, life = tonumber(number), name end
end

local function answer(status, at, found)
  return finish(KEYS[1], { begin_reply(now_us), pack_struct('<BdHd', status, revision, at, found) })
end

if expected ~= ANY and expected ~= revision then return answer(STALE, 0, 0) end

-- Returns an entry's revision, owner ('' = none) and text. A damaged entry is a text of revision 0.
local function read_entry(raw)
  local number, name, text = string.match(raw, '^(%d+)@([%w._-]+) (.*)$')
  if number then return tonumber(number), name, text end
  number, text = string.match(raw, '^(%d+) (.*)$')
  return tonumber(number or 0), '', text or raw
end

-- Read and judge every change first: there is no rollback.
local entries, texts, befores, owners = {}, {}, {}, {}
local kept = 0  -- the revision of the last entry
local at, size = 1, call('HLEN', KEYS[2]) - (standing and 1 or 0)
for i = 1, count do
  local found, wanted = 0
  wanted, entries[i], texts[i], at = unpack_struct('<dHc0Ic0', ARGV[3], at)
  local raw = call('HGET', KEYS[2], entries[i])
  befores[i], owners[i] = '', ''
  if raw then found, owners[i], befores[i] = read_entry(raw) end
  if wanted ~= ANY and wanted ~= found then return answer(CONFLICT, i - 1, found) end
  if not raw and texts[i] == '' then return answer(MISSING, i - 1, 0) end
  kept = found
  size = size + (raw and 0 or 1) - (texts[i] == '' and 1 or 0)
end
if size > ENTRIES_MAX then return answer(FULL, 0, 0) end

-- pcall: a damaged audit log or history must not prevent a change of policies.
local function remember(i)
  local history, whose = KEYS[BEFORE + i], texts[i] == '' and owners[i] or owner
  if action ~= MOVE then
    local logged = pack_struct('<ddBHc0Hc0Ic0Ic0Hc0', revision, now_us, action, #who, who, #entries[i], entries[i],
      #befores[i], befores[i], #texts[i], texts[i], #whose, whose)
    redis.pcall('LPUSH', KEYS[3], logged)
    redis.pcall('LPUSH', history, logged)
    redis.pcall('LTRIM', history, 0, HISTORY_MAX - 1)
  end
  if texts[i] == '' then
    call('EXPIRE', history, DELETED_HISTORY_S)
  else
    call('PERSIST', history)
  end
end

local changed, whose = false, owner == '' and '' or '@' .. owner
for i = 1, count do
  if texts[i] == '' or texts[i] ~= befores[i] or owners[i] ~= owner then
    if not changed then revision, changed = revision + 1, true end
    if texts[i] == '' then
      call('HDEL', KEYS[2], entries[i])
    else
      call('HSET', KEYS[2], entries[i], string.format('%.0f%s ', revision, whose) .. texts[i])
    end
    remember(i)
  end
end
if changed then
  call('HSET', KEYS[2], 'revision', string.format('%.0f ', revision) .. life)
  redis.pcall('LTRIM', KEYS[3], 0, AUDIT_MAX - 1)
  redis.pcall('PUBLISH', ARGV[4], string.format('%.0f', revision))  -- nodes that miss it poll
end
return answer(APPLIED, 0, changed and 0 or kept)
