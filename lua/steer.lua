#!lua
--[[ steer: set caps, charges, units, shares and overload control of a batch of buckets, and keep what is known of them.
KEYS[1]   lease         string, fence number and owner, see lib/lease.lua
KEYS[2..] buckets       string records, see lib/record.lua; after them the controller's state of those whose state is set
ARGV[1]   head          now_us (0 = server clock; only tests send one), number of buckets, then the token: fence number
                        and owner
ARGV[2]   params        rows of policy parameters, see lib/record.lua
ARGV[3]   rows          a row per bucket: the number of its row in params, what is set (bits), cap, charge, work for
                        which it is to count requests (0 = count work), share, share_for_us; where overload control is
                        set: quality, state, lent_for_us, response_ms, and of each class the share refused, then the
                        rate, then the limit of what is in flight; where charges by values of learn_by are set: their
                        number, id and charge of each; where a state is set: its size, state
RETURNS   one string: done or lost, now_us, then a status per bucket; limiter/store/call_layout.py reads it
HOLDS     a stale owner changes nothing (F-P7); absolute values, so a repeat changes nothing more; invalid values
          are ignored (F-P8); refill before anything changes; balance <= capacity; a change of unit keeps the time that
          the balance is worth (R10); a bucket is made only to hold a share; a row that sets nothing but a state leaves its
          record alone; bytes of an unknown form are not changed ]]

-- #include lib/record.lua
-- #include lib/lease.lua

local BEFORE = 1  -- keys before those of the buckets
local ROW_DONE, ROW_ABSENT, ROW_CORRUPT = 1, 2, 3
local SETS_CAP, SETS_CHARGE, SETS_UNIT, SETS_SHARE, SETS_STATE, SETS_OVERLOAD, SETS_CHARGES = 1, 2, 4, 8, 16, 32, 64
local LASTS, LASTS_S = 128, 86400  -- R15: the state is kept so much longer than its bucket
local SHARE_MIN = 1e-6               -- a smaller share would starve its partition
local SHARE_FOR_MAX_US = 3600000000
local ORDER_SHARES, ORDER_RATES, ORDER_LIMITS = 5, 9, 13  -- where in an order those of the classes begin

local now_us, count, token_at = unpack_struct('<dH', ARGV[1])
local is_sent = now_us ~= 0
if not is_sent then
  local time = call('TIME')
  now_us = time[1] * 1000000 + time[2]
end
if read_lease(KEYS[1]) ~= string.sub(ARGV[1], token_at) then return pack_struct('<Bd', LOST, now_us) end

-- The row at hand.
local sets, cap, charge, requests_for, share, share_for_us
local charges  -- W15: ids and charges
local order = {}  -- quality, state, lent_for_us and response_ms as in lib/record.lua, then those of the classes

local function gives_share(params)
  return has(sets, SETS_SHARE) and params.divided and not params.quota
    and share >= SHARE_MIN and share <= 1 and share_for_us > 0 and share_for_us <= SHARE_FOR_MAX_US
end

local function is_cap_sound()
  return has(sets, SETS_CAP) and cap > 0 and cap <= RATE_MAX
end

-- Whether a bucket that is of its policy's kind takes a cap, and no share: what most rows are about.
local function caps_only(record, params)
  local flags = record[FLAGS]
  return flags == params.flags and flags % HAS_HISTOGRAM == COUNTS_REQUESTS and not has(sets, SETS_SHARE)
    and is_cap_sound()
end

local function set_unit_and_cap(record, params)
  local sound_cap = is_cap_sound() and cap or nil
  local counts = has(record[FLAGS], COUNTS_REQUESTS)
  local lends = params.auto and has(sets, SETS_UNIT) and requests_for >= 0 and requests_for <= RATE_MAX
  -- So little work that the sum does not show it lends nothing: the bucket would change its unit there and back.
  local wanted = record[WORK_SETTLED] + requests_for > record[WORK_SETTLED]
  if lends and wanted ~= counts then
    local flags = record[FLAGS] + (wanted and COUNTS_REQUESTS or -COUNTS_REQUESTS)
    recount(record, params, share_of(record, params, now_us), flags, wanted and sound_cap or nil)
  elseif sound_cap and counts then
    record[RATE] = sound_cap
  end
  if lends then record[REQUESTS_UNTIL] = record[WORK_SETTLED] + requests_for end
end

-- Q4, S3, S4, S9: one number that makes no sense leaves the others as they are. A class that was not limited begins with
-- a second's worth of requests; one that was keeps what it has, as far as its new rate allows.
local function set_shedding(shedding)
  if shedding[LENT_UNTIL] == 0 then end_lent(shedding) end
  local state, lent_for_us, response_ms = order[STATE], order[LENT_UNTIL], order[RESPONSE_MS]
  if order[QUALITY] >= 0 and order[QUALITY] <= 1 then shedding[QUALITY] = order[QUALITY] end
  if state == 0 or state == 1 or state == 2 or state == 3 then shedding[STATE] = state end
  if lent_for_us > 0 and lent_for_us <= LENT_FOR_MAX_US then shedding[LENT_UNTIL] = now_us + lent_for_us end
  if response_ms >= 0 and response_ms <= RATE_MAX then shedding[RESPONSE_MS] = response_ms end
  for class = 0, CLASSES - 1 do
    local refused_share, rate = order[ORDER_SHARES + class], order[ORDER_RATES + class]
    local limit = order[ORDER_LIMITS + class]
    if refused_share >= 0 and refused_share <= 1 then shedding[SHED_SHARE + class] = refused_share end
    if limit >= 0 and limit <= RATE_MAX then shedding[SHED_LIMIT + class] = limit end
    if rate >= 0 and rate <= RATE_MAX then
      local tokens, most = shedding[SHED_TOKENS + class], rate > 1 and rate or 1
      if rate == 0 then
        tokens = 0
      elseif shedding[SHED_RATE + class] == 0 or tokens > most then
        tokens = most
      end
      shedding[SHED_RATE + class], shedding[SHED_TOKENS + class] = rate, tokens
    end
  end
end

-- W15: charges of values of learn_by, those included that this bucket has not met yet.
local function set_charges(entries)
  for i = 1, #charges do
    local id, learned = charges[i][1], charges[i][2]
    if learned > 0 and learned <= RATE_MAX then entry_for(entries, id)[2] = learned end
  end
end

local function steer(record, params)
  local is_capped = caps_only(record, params)
  if is_capped then
    -- One adoption, below, does for the policy and the cap.
    refill(record, now_us)
    record[RATE], record[COMMITTED] = cap, params.committed * share_of(record, params, now_us)
  elseif in_window(params, now_us) then
    advance(record, params, now_us)
  else
    refill(record, now_us)
  end
  if has(sets, SETS_OVERLOAD) and record[SHEDDING] then set_shedding(record[SHEDDING]) end
  if has(sets, SETS_CHARGE) and charge > 0 and charge <= RATE_MAX then record[CHARGE] = charge end
  if has(sets, SETS_CHARGES) and record[LEARNED_BY] then set_charges(record[LEARNED_BY]) end
  if params.quota then return end
  if gives_share(params) then
    record[SHARE], record[SHARE_UNTIL], record[SHARE_PARTITIONS] = share, now_us + share_for_us, params.partitions
    adopt(record, params, now_us)
  end
  if not is_capped then set_unit_and_cap(record, params) end
  adopt(record, params, now_us)
end

local raws = count > 0 and call('MGET', unpack(KEYS, 1, BEFORE + count)) or {}
local params, records = unpack_params(ARGV[2]), unpack_records(raws, BEFORE, count)
local rows, at, statuses, states, state_keys, next_state = ARGV[3], 1, {}, {}, {}, BEFORE + count + 1
local lasting = {}
local steered = {}  -- whose record has to be written: the state of most is kept without touching them
for i = 1, count do
  local number
  number, sets, cap, charge, requests_for, share, share_for_us, at = unpack_struct('<HBddddd', rows, at)
  if has(sets, SETS_OVERLOAD) then
    for field = QUALITY, ORDER_LIMITS + CLASSES - 1 do order[field], at = unpack_struct('<d', rows, at) end
  end
  charges = {}
  if has(sets, SETS_CHARGES) then
    local left, id, learned
    left, at = unpack_struct('<B', rows, at)
    for _ = 1, left do
      id, learned, at = unpack_struct('<Id', rows, at)
      charges[#charges + 1] = { id, learned }
    end
  end
  if has(sets, SETS_STATE) then
    states[i], at = unpack_struct('<Ic0', rows, at)
    state_keys[i], next_state, lasting[i] = KEYS[next_state], next_state + 1, has(sets, LASTS)
  end
  local term, record = params[number], records[i]
  if record == false and gives_share(term) then
    record = fresh_record(term, now_us)
    records[i] = record
  end
  if record then
    if sets % LASTS ~= SETS_STATE and sets % LASTS ~= 0 then
      steer(record, term)
      steered[i] = true
    end
    statuses[i] = ROW_DONE
  else
    statuses[i] = record == nil and ROW_CORRUPT or ROW_ABSENT
  end
end

for i = 1, count do
  if statuses[i] == ROW_DONE then
    local record = records[i]
    if steered[i] then write_record(KEYS[BEFORE + i], raws[BEFORE + i], record, now_us, is_sent) end
    if states[i] then  -- kept as long as the bucket is, or a while longer
      local kept_s = (keep(record, now_us) or record[KEPT_UNTIL]) + (lasting[i] and LASTS_S or 0)
      call('SET', state_keys[i], states[i], expiry(kept_s, now_us, is_sent))
    end
  end
end
return pack_struct('<Bd', DONE, now_us) .. string.char(unpack(statuses))
