--[[ record: the live state of one bucket, kept as one string.
Layout: version byte, two bytes of flags, then fixed fields: in front all that an acquire of a plain bucket reads and,
before KEPT_UNTIL, all that it changes, so that it writes nothing else (SETRANGE); then room for what later versions count
with each acquire; then what a settle changes; then the terms, as the policy had them when last seen. Behind these stand
trailers, each where its flag says so and in this order: a latency histogram (with overload control one for each class),
the share of a bucket whose limit is divided over partitions, until when an auto bucket may count requests, what
overload control goes by, the refusals of a key that may be blocked. A new capability adds a flag and a trailer; a record
with a flag that is not known here is not ours. Records of version 1 are read, and written as version 2.
Amounts and times stay float64: nothing passes through text, so the model in limiter/model/bucket/bucket.py,
shedding.py and block.py, doing the same operations in the same order, agrees to the bit.
limiter/store/layout.py packs the same bytes. ]]

local pack_struct, unpack_struct, call = struct.pack, struct.unpack, redis.call

local VERSION, FLAGS = 1, 2
local UPDATED = 3      -- us, when the balance was last brought up to date
local BALANCE = 4      -- units of work, or requests; negative is debt; a quota's remainder
local REQUESTS, ADMITTED, REFUSED, WORK_CHARGED = 5, 6, 7, 8
local EPOCH = 9        -- int32, the sampling epoch in which this bucket was last listed as touched
local KEPT_UNTIL = 10  -- uint32, s, when the key expires: at least as long as it is needed, moved about once a minute
local CHARGE = 11      -- W8: learned charge, 0 while nothing is learned
local ROOM = 12        -- 24 bytes, kept as they are: for what is in flight in two slots of time (2 float64; UPDATED tells
                       -- which slots), and for second and further attempts (2 uint32)
local WORK_SETTLED, WORK_SQUARED = 13, 14
local SETTLES, MISSED, UNCOLLECTED = 15, 16, 17
local RATE = 18        -- refill a second: the committed rate, or the steered cap of a request bucket
local CAPACITY = 19    -- most the balance may be: capacity, burst, or a quota's limit
local COMMITTED = 20   -- the policy's rate when last seen, as far as this bucket's share of it goes
local DEBT_MAX = 21
local THRESHOLD = 22   -- W6: units if positive, a share of the charge if negative
local STOP_DEBT = 23   -- W7: debt beyond which a progress call answers stop
local HISTOGRAM = 24   -- raw counts, '' where the policy needs none
local SHARE = 25       -- B5: part of a divided limit, as the controller gave it; only records of divided limits have it
local SHARE_UNTIL = 26       -- us, when that ends and the bucket falls back to an equal part
local SHARE_PARTITIONS = 27  -- of how many partitions it was a part: with another number of them it means nothing
local REQUESTS_UNTIL = 28    -- R10: WORK_SETTLED at which an auto bucket counts work again; only auto records have it
local SHEDDING = 29    -- table: overload control; only records of policies with an `overload` block have it
local COUNTED_UNTIL, BLOCK_REFUSED, BLOCKED_UNTIL = 30, 31, 32  -- W17: us, refusals, us; only where a policy blocks keys
local WINDOW_END, WINDOW_START = 18, 20  -- RATE, COMMITTED: a quota has a window (us) where a rate bucket has rates

local LAYOUT, LAYOUT_BEFORE = 2, 1
local FIELDS = '<BHddddddiIdc24ddddddddddd'
local FIELDS_BEFORE = '<BBddddddddddddddddddd'
local SIZE, SIZE_BEFORE = 179, 154
local FRONT, CHANGING = 3, 131  -- bytes before what acquires and settles change, and as far as that goes
local NO_ROOM = string.rep('\0', 24)
local SHARE_SIZE, REQUESTS_UNTIL_SIZE, BLOCK_SIZE = 24, 8, 24
local QUOTA, COUNTS_REQUESTS, HAS_HISTOGRAM = 1, 2, 4  -- flag bits a record shares with its params
local DIVIDED = 8      -- the limit is divided over partitions: params say the whole, the record holds a share
local AUTO = 16        -- R10: the record's own COUNTS_REQUESTS says how it counts; steer.lua lends it for some work
local OVERLOAD = 32    -- the policy has an `overload` block
local BLOCK = 64       -- W17: the policy blocks keys; the highest bit that a record has, so far
local BEYOND = 128     -- a flag of this or more is one that no record of ours has
local SHADOW = 32768   -- P11: of params only

-- What record[SHEDDING] holds; each class has its place in four numbers, class 0 (critical_plus) being the first.
local CLASSES = 4
local QUALITY = 1      -- S4: how good answers should be, 0 to 1; set by the controller
local OVERLOADED = 2   -- Q6: 1 while callers should slow down; set by the controller
local SHED_SHARE = 3   -- Q4: share of a class's requests that is refused, 0 to 1; set by the controller
local SHED_RATE = 7    -- S3: requests a second of a class, 0: not limited; set by the controller
local SHED_TOKENS = 11 -- requests that a class may send at once; come at its rate, a second's worth at most
local SHED = 15        -- requests of a class that were refused
local TIMED = 19       -- settled requests of a class that told how long they took
local LATE = 23        -- those of them that took longer than expected
local SLACK_MIN = 27   -- ms, least of expected - actual since the bucket was last listed as touched
local SLACK_BEFORE = 28  -- ms, the same between the last two listings
local SHEDDING_FIELDS = '<' .. string.rep('d', 28)
local SHEDDING_SIZE, SHEDDING_COUNT = 224, 28

local OCTAVES, OCTAVE_MIN, STEPS = 18, -2, 4  -- histogram: 0.125 ms to 32 s, four steps to an octave
local HISTOGRAM_SIZE = OCTAVES * STEPS * 8

local STEP_BACK_MAX_US = 1000000     -- a clock this far back waits for the past to catch up; further back re-anchors
local IDLE_TTL_S = 600               -- a bucket is kept at least this long after its last use
local TTL_MAX_S = 31622400           -- and at most 366 days
local KEPT_LONGER_S = 60             -- and this much longer, so that the expiry need not be moved with every use
local KEPT_MAX_S = 4294967295
local RATE_MAX = 9007199254740992    -- 2^53

local function has(flags, bit_value)
  return flags % (bit_value * 2) >= bit_value
end

--[[ Params: what a policy says of a bucket, a row each (limiter/store/layout.py), longer where keys are blocked. ]]
local PARAMS = '<Hddddddddddd'

local function unpack_params(rows)
  local params, at, size = {}, 1, #rows
  while at <= size do
    local flags, committed, cap, capacity, burst, burst_s, debt_max, threshold, stop_debt, window_start, window_end,
      partitions, after = unpack_struct(PARAMS, rows, at)
    local quota, counts_requests = has(flags, QUOTA), has(flags, COUNTS_REQUESTS)
    local term = {
      flags = flags % SHADOW, quota = quota, histogram = has(flags, HAS_HISTOGRAM), divided = has(flags, DIVIDED),
      auto = has(flags, AUTO), overload = has(flags, OVERLOAD), shadow = flags >= SHADOW, committed = committed,
      cap = cap, capacity = capacity, burst = burst, burst_s = burst_s, debt_max = debt_max, threshold = threshold,
      stop_debt = stop_debt, window_start = window_start, window_end = window_end, partitions = partitions,
      -- What a whole bucket holds at the start, in the unit that minimums are given in.
      whole_capacity = counts_requests and not quota and math.max(1, burst + burst_s * cap) or capacity,
    }
    at = after
    if has(flags, BLOCK) then
      term.block_after, term.block_in, term.block_for, at = unpack_struct('<ddd', rows, at)
    end
    params[#params + 1] = term
  end
  return params
end

-- B5: what the controller gave holds for a time, and for as many partitions as there were; else each has an equal part.
local function share_of(record, params, now_us)
  if not params.divided then return 1 end
  if now_us < record[SHARE_UNTIL] and record[SHARE_PARTITIONS] == params.partitions then return record[SHARE] end
  return 1 / params.partitions
end

-- R7: a burst given as time at the cap follows the cap; fewer than one token could never admit anything.
local function burst_of(params, share, cap)
  return math.max(1, params.burst * share + params.burst_s * cap)
end

-- The rates and the capacity that a bucket starts with, by how its flags say it counts.
local function begin_terms(record, params, share)
  if params.quota then
    record[WINDOW_END], record[WINDOW_START] = params.window_end, params.window_start
    record[CAPACITY] = params.capacity * share
  elseif has(record[FLAGS], COUNTS_REQUESTS) then
    record[RATE], record[COMMITTED] = params.cap * share, params.committed * share
    record[CAPACITY] = burst_of(params, share, record[RATE])
  else
    local committed = params.committed * share
    record[RATE], record[COMMITTED], record[CAPACITY] = committed, committed, params.capacity * share
  end
end

-- How much may be owed. A request bucket may owe for as long as a work bucket: requests / cap = work / committed.
local function adopt_bounds(record, params, share)
  local debt_max, stop_debt = params.debt_max, params.stop_debt
  if record[FLAGS] % HAS_HISTOGRAM == COUNTS_REQUESTS then
    local rate, committed = record[RATE], params.committed
    debt_max, stop_debt = debt_max * rate / committed, stop_debt * rate / committed
  else
    debt_max, stop_debt = debt_max * share, stop_debt * share
  end
  record[DEBT_MAX], record[THRESHOLD], record[STOP_DEBT] = debt_max, params.threshold, stop_debt
end

local function no_latencies(params)
  return params.histogram and string.rep('\0', HISTOGRAM_SIZE * (params.overload and CLASSES or 1)) or ''
end

local function no_shedding()
  local shedding = { 1 }
  for i = OVERLOADED, LATE + CLASSES - 1 do shedding[i] = 0 end
  shedding[SLACK_MIN], shedding[SLACK_BEFORE] = math.huge, math.huge
  return shedding
end

local function fresh_record(params, now_us)
  local record = { LAYOUT, params.flags, now_us, 0, 0, 0, 0, 0, -1, 0, 0, NO_ROOM, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    no_latencies(params), 0, 0, 0, 0, params.overload and no_shedding() or nil }
  if params.block_for then record[COUNTED_UNTIL], record[BLOCK_REFUSED], record[BLOCKED_UNTIL] = 0, 0, 0 end
  local share = share_of(record, params, now_us)
  begin_terms(record, params, share)
  adopt_bounds(record, params, share)
  record[BALANCE] = record[CAPACITY]
  return record
end

-- Whether what the controller set is something that it may set. Written so that NaN fails as well.
local function is_sound(shedding)
  local overloaded = shedding[OVERLOADED]
  if not (shedding[QUALITY] >= 0 and shedding[QUALITY] <= 1 and (overloaded == 0 or overloaded == 1)) then
    return false
  end
  for class = 0, CLASSES - 1 do
    local share, rate, tokens = shedding[SHED_SHARE + class], shedding[SHED_RATE + class], shedding[SHED_TOKENS + class]
    if not (share >= 0 and share <= 1 and rate >= 0 and rate <= RATE_MAX and tokens >= 0 and tokens <= RATE_MAX) then
      return false
    end
  end
  return true
end

-- What follows the fields, by what the flags say there is; whether the size agrees, and all of it makes sense.
local function unpack_rest(record, raw, size, at)
  local flags = record[FLAGS]
  local with_histogram, divided, overload = has(flags, HAS_HISTOGRAM), has(flags, DIVIDED), has(flags, OVERLOAD)
  local histogram_size = with_histogram and HISTOGRAM_SIZE * (overload and CLASSES or 1) or 0
  local auto, block = has(flags, AUTO), has(flags, BLOCK)
  if size ~= at + histogram_size + (divided and SHARE_SIZE or 0) + (auto and REQUESTS_UNTIL_SIZE or 0)
    + (overload and SHEDDING_SIZE or 0) + (block and BLOCK_SIZE or 0) then
    return false
  end
  record[HISTOGRAM] = string.sub(raw, at + 1, at + histogram_size)
  at = at + histogram_size + 1
  if divided then
    record[SHARE], record[SHARE_UNTIL], record[SHARE_PARTITIONS], at = unpack_struct('<ddd', raw, at)
    if not (record[SHARE] > 0 and record[SHARE] <= 1 or record[SHARE_PARTITIONS] == 0) then return false end
  end
  if auto then record[REQUESTS_UNTIL], at = unpack_struct('<d', raw, at) end
  if overload then
    record[SHEDDING] = { unpack_struct(SHEDDING_FIELDS, raw, at) }
    if not is_sound(record[SHEDDING]) then return false end
  end
  if not block then return true end
  -- From the end, as is_sound has seen to it that all before is whole.
  local counted_until, refused, blocked_until = unpack_struct('<ddd', raw, size - BLOCK_SIZE + 1)
  record[COUNTED_UNTIL], record[BLOCK_REFUSED], record[BLOCKED_UNTIL] = counted_until, refused, blocked_until
  return counted_until >= 0 and refused >= 0 and blocked_until >= 0 and blocked_until < math.huge
end

-- The fixed fields of a record as this version has them, and how many bytes they take; nil if it is of no version known.
local function unpack_fields(raw, size)
  local version = string.byte(raw)
  if version == LAYOUT and size >= SIZE then return { unpack_struct(FIELDS, raw) }, SIZE end
  if version ~= LAYOUT_BEFORE or size < SIZE_BEFORE then return nil end
  local _, flags, updated, balance, rate, capacity, committed, debt_max, threshold, stop_debt, charge, epoch, requests,
    admitted, refused, work_charged, work_settled, work_squared, settles, missed, uncollected =
    unpack_struct(FIELDS_BEFORE, raw)
  return { LAYOUT, flags, updated, balance, requests, admitted, refused, work_charged, epoch, 0, charge, NO_ROOM,
    work_settled, work_squared, settles, missed, uncollected, rate, capacity, committed, debt_max, threshold,
    stop_debt }, SIZE_BEFORE
end

-- F-S11: nil means that these bytes are not a record of ours.
local function unpack_record(raw)
  local size = #raw
  local record, fixed_size = unpack_fields(raw, size)
  if not record then return nil end
  local balance, capacity, rate = record[BALANCE], record[CAPACITY], record[RATE]
  -- Written so that NaN fails as well.
  if not (balance > -math.huge and balance <= capacity and capacity > 0 and capacity < math.huge
    and rate > 0 and rate < math.huge and record[UPDATED] > 0) or record[FLAGS] >= BEYOND then return nil end
  if size == fixed_size and record[FLAGS] < HAS_HISTOGRAM then
    record[HISTOGRAM] = ''
  elseif not unpack_rest(record, raw, size, fixed_size) then
    return nil
  end
  return record
end

local function pack_record(record)
  local packed = pack_struct(FIELDS, unpack(record, 1, 23))
  if record[FLAGS] < HAS_HISTOGRAM then return packed end
  packed = packed .. record[HISTOGRAM]
  if has(record[FLAGS], DIVIDED) then
    packed = packed .. pack_struct('<ddd', record[SHARE], record[SHARE_UNTIL], record[SHARE_PARTITIONS])
  end
  if has(record[FLAGS], AUTO) then packed = packed .. pack_struct('<d', record[REQUESTS_UNTIL]) end
  local shedding = record[SHEDDING]
  if shedding then packed = packed .. pack_struct(SHEDDING_FIELDS, unpack(shedding, 1, SHEDDING_COUNT)) end
  if record[FLAGS] < BLOCK then return packed end
  return packed .. pack_struct('<ddd', record[COUNTED_UNTIL], record[BLOCK_REFUSED], record[BLOCKED_UNTIL])
end

-- Records by number, from what MGET found of the keys, bucket i being raws[before + i]. false: there is none yet; nil: what
-- stands there is not ours and stays untouched (F-S11).
local function unpack_records(raws, before, count)
  local records = {}
  for i = 1, count do
    if raws[before + i] then
      records[i] = unpack_record(raws[before + i])
    elseif call('EXISTS', KEYS[before + i]) == 0 then  -- MGET shows a key of another type as missing
      records[i] = false
    end
  end
  return records
end

-- S3: a class that is limited may gather a second's worth of requests, and one at least.
local function refill_classes(shedding, elapsed_us)
  for class = 0, CLASSES - 1 do
    local rate = shedding[SHED_RATE + class]
    if rate > 0 then
      local tokens, most = shedding[SHED_TOKENS + class] + elapsed_us * rate / 1e6, rate > 1 and rate or 1
      shedding[SHED_TOKENS + class] = tokens < most and tokens or most
    end
  end
end

-- W1, F-T1, F-T2: credit for the time since the last update; none for a clock that went back.
local function refill(record, now_us)
  local elapsed_us = now_us - record[UPDATED]
  if elapsed_us > 0 then
    if record[FLAGS] % 2 ~= QUOTA then
      local balance, capacity = record[BALANCE] + elapsed_us * record[RATE] / 1e6, record[CAPACITY]
      if balance > capacity then balance = capacity end
      record[BALANCE] = balance
    end
    if record[SHEDDING] then refill_classes(record[SHEDDING], elapsed_us) end
    record[UPDATED] = now_us
  elseif elapsed_us < -STEP_BACK_MAX_US then
    record[UPDATED] = now_us
  end
end

-- P4: a later window starts afresh; an earlier one means that the clock went back, and forgives nothing.
local function roll(record, params, stepped_back)
  local start = params.window_start
  if start > record[WINDOW_START] then
    record[BALANCE] = record[CAPACITY]
    record[WINDOW_START] = start
  elseif stepped_back then
    record[WINDOW_START] = start
  end
  record[WINDOW_END] = params.window_end
end

-- R10: count in another unit from now on. The balance is worth as much time as before, debt and surplus alike; where a
-- quota is involved there is no such time, and the balance keeps its share of the capacity.
local function recount(record, params, share, flags, cap)
  local balance, rate, capacity = record[BALANCE], record[RATE], record[CAPACITY]
  local timeless = params.quota or has(record[FLAGS], QUOTA)
  record[FLAGS] = flags
  begin_terms(record, params, share)
  if cap then record[RATE] = cap end
  balance = timeless and balance / capacity * record[CAPACITY] or balance * record[RATE] / rate
  record[BALANCE] = balance > -RATE_MAX and balance or -RATE_MAX
end

-- What a debit of this size can still take before the debt reaches its bound (W5).
local function collectable(record, amount)
  local room = record[BALANCE] + record[DEBT_MAX]
  if not (room > 0) then room = 0 end  -- not even minus zero
  if amount > room then return room end
  return amount
end

-- R10: what was settled beyond that for which requests could be counted is owed, as any other work (W5).
local function repay(record, params, share)
  local overrun = record[WORK_SETTLED] - record[REQUESTS_UNTIL]
  if overrun > 0 then
    adopt_bounds(record, params, share)
    record[BALANCE] = record[BALANCE] - collectable(record, overrun)
  end
end

-- The kind of bucket that a policy wants now. An auto bucket counts requests only for as much work as it was lent that.
local function convert(record, params, now_us)
  local before, flags = record[FLAGS], params.flags
  if params.auto and before % HAS_HISTOGRAM == COUNTS_REQUESTS
    and record[WORK_SETTLED] < (record[REQUESTS_UNTIL] or 0) then flags = flags + COUNTS_REQUESTS end
  if before == flags then return end
  local overload = has(before, OVERLOAD)
  if has(before, HAS_HISTOGRAM) ~= params.histogram or overload ~= params.overload then
    record[HISTOGRAM] = no_latencies(params)
  end
  if overload ~= params.overload then record[SHEDDING] = params.overload and no_shedding() or nil end
  if has(before, DIVIDED) ~= params.divided then
    record[SHARE], record[SHARE_UNTIL], record[SHARE_PARTITIONS] = 0, 0, 0
  end
  if has(before, AUTO) ~= params.auto then record[REQUESTS_UNTIL] = 0 end
  if before < BLOCK and params.block_for then
    record[COUNTED_UNTIL], record[BLOCK_REFUSED], record[BLOCKED_UNTIL] = 0, 0, 0
  end
  if before % HAS_HISTOGRAM ~= flags % HAS_HISTOGRAM then
    local share = share_of(record, params, now_us)
    recount(record, params, share, flags)
    if params.auto and has(before, AUTO) then repay(record, params, share) end
  end
  record[FLAGS] = flags
end

-- W9: a changed policy, or share of one, reaches the live bucket: debt survives, surplus is clamped, nothing is reset
-- to full.
local function adopt(record, params, now_us)
  if record[FLAGS] ~= params.flags then convert(record, params, now_us) end
  local share = params.divided and share_of(record, params, now_us) or 1
  local capacity = params.capacity * share
  if params.quota then
    record[BALANCE] = record[BALANCE] + (capacity - record[CAPACITY])
  else
    local committed = params.committed * share
    if record[FLAGS] % HAS_HISTOGRAM ~= COUNTS_REQUESTS then
      record[RATE] = committed
    else
      if record[COMMITTED] ~= committed then
        -- The cap keeps its proportion to the committed rate.
        local cap = record[RATE] * committed / record[COMMITTED]
        record[RATE] = (cap > 0 and cap < RATE_MAX) and cap or params.cap * share
      end
      capacity = burst_of(params, share, record[RATE])
    end
    record[COMMITTED] = committed
  end
  record[CAPACITY] = capacity
  if record[BALANCE] > capacity then record[BALANCE] = capacity end
  adopt_bounds(record, params, share)
end

-- Bring a bucket to now under the old terms, then to the terms of the policy.
local function advance(record, params, now_us)
  local stepped_back = record[UPDATED] - now_us > STEP_BACK_MAX_US
  refill(record, now_us)
  if params.quota and has(record[FLAGS], QUOTA) then roll(record, params, stepped_back) end
  adopt(record, params, now_us)
end

-- A bucket that would be full again tells nothing: it may go then, but not before it has been idle a while, nor before
-- its share ends: forgotten earlier, it would hold an equal part while the others hold what it gave up.
local function needed_until_s(record, now_us)
  local s
  local flags = record[FLAGS]
  if flags % 2 == QUOTA then
    s = (record[WINDOW_END] - now_us) / 1e6
  else
    s = (record[CAPACITY] - record[BALANCE]) / record[RATE]
  end
  if flags >= DIVIDED and has(flags, DIVIDED) then s = math.max(s, (record[SHARE_UNTIL] - now_us) / 1e6) end
  if flags >= BLOCK then
    s = math.max(s, (record[COUNTED_UNTIL] - now_us) / 1e6, (record[BLOCKED_UNTIL] - now_us) / 1e6)
  end
  if not (s < TTL_MAX_S) then return now_us / 1e6 + TTL_MAX_S end
  return now_us / 1e6 + ((s > 0 and s or 0) + IDLE_TTL_S)
end

-- The key's new expiry (s), where the one that it has is too early, or so late that it would stay for nothing; else nil.
local function keep(record, now_us)
  local needed_s, kept_s = needed_until_s(record, now_us), record[KEPT_UNTIL]
  if kept_s >= needed_s and kept_s <= needed_s + 2 * KEPT_LONGER_S then return nil end
  kept_s = math.ceil(needed_s) + KEPT_LONGER_S
  record[KEPT_UNTIL] = kept_s < KEPT_MAX_S and kept_s or KEPT_MAX_S
  return kept_s
end

-- How SET is told of an expiry. A time that a test sends is not the server's: there it says how long that is from now.
local function expiry(kept_s, now_us, is_sent)
  if is_sent then return 'PX', math.ceil(kept_s * 1000 - now_us / 1000) end
  return 'PXAT', kept_s .. '000'
end

-- Write a record: only what acquires and settles change, if all else is as it was read.
local function write_record(key, raw, record, now_us, is_sent)
  local kept_s, packed = keep(record, now_us), pack_record(record)
  if kept_s then
    call('SET', key, packed, expiry(kept_s, now_us, is_sent))
  elseif string.sub(packed, 1, FRONT) == string.sub(raw, 1, FRONT)
    and string.sub(packed, CHANGING + 1) == string.sub(raw, CHANGING + 1) then
    call('SETRANGE', key, FRONT, string.sub(packed, FRONT + 1, CHANGING))
  else
    call('SET', key, packed, 'KEEPTTL')
  end
end

-- Calendar windows come from the node; one that does not hold the server's time is answered, not used (F-T4).
local function in_window(params, now_us)
  return not params.quota or (now_us >= params.window_start and now_us < params.window_end)
end
