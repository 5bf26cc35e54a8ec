#!lua flags=allow-oom
--[[ settle: correct what acquires charged, each reservation once; or debit a long request as it goes (W5-W7).
Runs without memory to spare too (allow-oom): a store that is full must still take back what is owed.
KEYS[1]   reply         string, this call's reply, kept so that a repeat changes nothing
KEYS[2]   sampling      string, number of the sampling epoch, moved by the controller
KEYS[3]   touched       list of the buckets changed since the last sampling
KEYS[4..] buckets       string records, see lib/record.lua; after them a tombstone for each reservation
ARGV[1]   head          now_us (0 = server clock; only tests send one), expires_us (0 = never), number of buckets
ARGV[2]   params        rows of policy parameters, see lib/record.lua
ARGV[3]   terms         for each bucket the number of its row in params, 0 where its policy is gone
ARGV[4]   operations    tombstone, final and class (bits), buckets, work, requests, latency_ms, expected_ms, acquired_us,
                        deadline_us, late_us; a row per bucket: number, bits, charge, weight, and if bits say so its own
                        expected_ms and what the acquire could not collect
RETURNS   one string: done or expired, now_us, then for each operation its status, late, stop, work, deadline_us now and
          before the call, and a row per bucket: present and unit, balance, adjusted, uncollected, rate, capacity;
          limiter/store/layout.py reads it
HOLDS     a repeat changes nothing; refill before refund; balance <= capacity; a debit stops at -debt_max and counts
          the rest; after the deadline nothing is refunded; progress renews the deadline; what is not ours is left as
          it is ]]

--[[ record: the live state of one bucket, kept as one string.
Layout: version byte, flags byte, 19 little-endian float64 fields, then a latency histogram where the policy needs
one (with overload control one for each class), then the share of a bucket whose limit is divided over partitions,
then until when an auto bucket may count requests, then what overload control goes by, then the refusals of a key that
may be blocked. Everything stays float64: nothing passes through text, so the model in limiter/model/bucket.py,
shedding.py and block.py, doing the same operations in the same order, agrees to the bit.
limiter/store/layout.py packs the same bytes. ]]

local pack_struct, unpack_struct, call = struct.pack, struct.unpack, redis.call






















local WINDOW_END, WINDOW_START = (5), (7)  -- a quota has a window where a rate bucket has rates (us)


local FIELDS = '<BB' .. string.rep('d', 19)
local SIZE = 2 + 19 * 8








-- What record[(27)] holds; each class has its place in four numbers, class 0 (critical_plus) being the first.











local SHEDDING_FIELDS = '<' .. string.rep('d', 28)



local HISTOGRAM_SIZE = (18) * (4) * 8






local function has(flags, bit_value)
  return flags % (bit_value * 2) >= bit_value
end

--[[ Params: what a policy says of a bucket, a row each (limiter/store/layout.py), longer where keys are blocked. ]]
local PARAMS = '<Bddddddddddd'

local function unpack_params(rows)
  local params, at, size = {}, 1, #rows
  while at <= size do
    local flags, committed, cap, capacity, burst, burst_s, debt_max, threshold, stop_debt, window_start, window_end,
      partitions, after = unpack_struct(PARAMS, rows, at)
    local quota, counts_requests = has(flags, (1)), has(flags, (2))
    local term = {
      flags = flags % (128), quota = quota, histogram = has(flags, (4)), divided = has(flags, (8)),
      auto = has(flags, (16)), overload = has(flags, (32)), shadow = flags >= (128), committed = committed,
      cap = cap, capacity = capacity, burst = burst, burst_s = burst_s, debt_max = debt_max, threshold = threshold,
      stop_debt = stop_debt, window_start = window_start, window_end = window_end, partitions = partitions,
      -- What a whole bucket holds at the start, in the unit that minimums are given in.
      whole_capacity = counts_requests and not quota and math.max(1, burst + burst_s * cap) or capacity,
    }
    at = after
    if has(flags, (64)) then
      term.block_after, term.block_in, term.block_for, at = unpack_struct('<ddd', rows, at)
    end
    params[#params + 1] = term
  end
  return params
end

-- B5: what the controller gave holds for a time, and for as many partitions as there were; else each has an equal part.
local function share_of(record, params, now_us)
  if not params.divided then return 1 end
  if now_us < record[(24)] and record[(25)] == params.partitions then return record[(23)] end
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
    record[(6)] = params.capacity * share
  elseif has(record[(2)], (2)) then
    record[(5)], record[(7)] = params.cap * share, params.committed * share
    record[(6)] = burst_of(params, share, record[(5)])
  else
    local committed = params.committed * share
    record[(5)], record[(7)], record[(6)] = committed, committed, params.capacity * share
  end
end

-- How much may be owed. A request bucket may owe for as long as a work bucket: requests / cap = work / committed.
local function adopt_bounds(record, params, share)
  local debt_max, stop_debt = params.debt_max, params.stop_debt
  if record[(2)] % (4) == (2) then
    local rate, committed = record[(5)], params.committed
    debt_max, stop_debt = debt_max * rate / committed, stop_debt * rate / committed
  else
    debt_max, stop_debt = debt_max * share, stop_debt * share
  end
  record[(8)], record[(9)], record[(10)] = debt_max, params.threshold, stop_debt
end

local function no_latencies(params)
  return params.histogram and string.rep('\0', HISTOGRAM_SIZE * (params.overload and (4) or 1)) or ''
end

local function no_shedding()
  local shedding = { 1 }
  for i = (2), (23) + (4) - 1 do shedding[i] = 0 end
  shedding[(27)], shedding[(28)] = math.huge, math.huge
  return shedding
end

local function fresh_record(params, now_us)
  local record = { (1), params.flags, now_us, 0, 0, 0, 0, 0, 0, 0, 0, -1, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    no_latencies(params), 0, 0, 0, 0, params.overload and no_shedding() or nil }
  if params.block_for then record[(28)], record[(29)], record[(30)] = 0, 0, 0 end
  local share = share_of(record, params, now_us)
  begin_terms(record, params, share)
  adopt_bounds(record, params, share)
  record[(4)] = record[(6)]
  return record
end

-- Whether what the controller set is something that it may set. Written so that NaN fails as well.
local function is_sound(shedding)
  local overloaded = shedding[(2)]
  if not (shedding[(1)] >= 0 and shedding[(1)] <= 1 and (overloaded == 0 or overloaded == 1)) then
    return false
  end
  for class = 0, (4) - 1 do
    local share, rate, tokens = shedding[(3) + class], shedding[(7) + class], shedding[(11) + class]
    if not (share >= 0 and share <= 1 and rate >= 0 and rate <= (9007199254740992) and tokens >= 0 and tokens <= (9007199254740992)) then
      return false
    end
  end
  return true
end

-- What follows the fields, by what the flags say there is; whether the size agrees, and all of it makes sense.
local function unpack_rest(record, raw, size)
  local flags, at = record[(2)], SIZE
  local with_histogram, divided, overload = has(flags, (4)), has(flags, (8)), has(flags, (32))
  local histogram_size = with_histogram and HISTOGRAM_SIZE * (overload and (4) or 1) or 0
  local auto, block = has(flags, (16)), has(flags, (64))
  if size ~= SIZE + histogram_size + (divided and (24) or 0) + (auto and (8) or 0)
    + (overload and (224) or 0) + (block and (24) or 0) then
    return false
  end
  record[(22)] = string.sub(raw, at + 1, at + histogram_size)
  at = at + histogram_size + 1
  if divided then
    record[(23)], record[(24)], record[(25)], at = unpack_struct('<ddd', raw, at)
    if not (record[(23)] > 0 and record[(23)] <= 1 or record[(25)] == 0) then return false end
  end
  if auto then record[(26)], at = unpack_struct('<d', raw, at) end
  if overload then
    record[(27)] = { unpack_struct(SHEDDING_FIELDS, raw, at) }
    if not is_sound(record[(27)]) then return false end
  end
  if not block then return true end
  -- From the end, as is_sound has seen to it that all before is whole.
  local counted_until, refused, blocked_until = unpack_struct('<ddd', raw, size - (24) + 1)
  record[(28)], record[(29)], record[(30)] = counted_until, refused, blocked_until
  return counted_until >= 0 and refused >= 0 and blocked_until >= 0 and blocked_until < math.huge
end

-- S11: nil means that these bytes are not a record of ours.
local function unpack_record(raw)
  local size = #raw
  if size < SIZE then return nil end
  local record = { unpack_struct(FIELDS, raw) }
  local balance, capacity, rate = record[(4)], record[(6)], record[(5)]
  -- Written so that NaN fails as well.
  if not (balance > -math.huge and balance <= capacity and capacity > 0 and capacity < math.huge
    and rate > 0 and rate < math.huge and record[(3)] > 0) or record[(1)] ~= (1)
    or record[(2)] >= (128) then return nil end  -- a flag that no record of ours has
  if size == SIZE and record[(2)] < (4) then
    record[(22)] = ''
  elseif not unpack_rest(record, raw, size) then
    return nil
  end
  return record
end

local function pack_record(record)
  local packed = pack_struct(FIELDS, unpack(record, 1, 21))
  if record[(2)] < (4) then return packed end
  packed = packed .. record[(22)]
  if has(record[(2)], (8)) then
    packed = packed .. pack_struct('<ddd', record[(23)], record[(24)], record[(25)])
  end
  if has(record[(2)], (16)) then packed = packed .. pack_struct('<d', record[(26)]) end
  local shedding = record[(27)]
  if shedding then packed = packed .. pack_struct(SHEDDING_FIELDS, unpack(shedding, 1, (28))) end
  if record[(2)] < (64) then return packed end
  return packed .. pack_struct('<ddd', record[(28)], record[(29)], record[(30)])
end

-- Records by number. false: there is none yet; nil: what stands there is not ours and stays untouched (S11).
local function read_records(keys, first, count)
  local records = {}
  if count == 0 then return records end
  local raws = call('MGET', unpack(keys, first, first + count - 1))
  for i = 1, count do
    if raws[i] then
      records[i] = unpack_record(raws[i])
    elseif call('EXISTS', keys[first + i - 1]) == 0 then  -- MGET shows a key of another type as missing
      records[i] = false
    end
  end
  return records
end

-- S3: a class that is limited may gather a second's worth of requests, and one at least.
local function refill_classes(shedding, elapsed_us)
  for class = 0, (4) - 1 do
    local rate = shedding[(7) + class]
    if rate > 0 then
      local tokens, most = shedding[(11) + class] + elapsed_us * rate / 1e6, rate > 1 and rate or 1
      shedding[(11) + class] = tokens < most and tokens or most
    end
  end
end

-- W1, T1, T2: credit for the time since the last update; none for a clock that went back.
local function refill(record, now_us)
  local elapsed_us = now_us - record[(3)]
  if elapsed_us > 0 then
    if record[(2)] % 2 ~= (1) then
      local balance, capacity = record[(4)] + elapsed_us * record[(5)] / 1e6, record[(6)]
      if balance > capacity then balance = capacity end
      record[(4)] = balance
    end
    if record[(27)] then refill_classes(record[(27)], elapsed_us) end
    record[(3)] = now_us
  elseif elapsed_us < -(1000000) then
    record[(3)] = now_us
  end
end

-- P4: a later window starts afresh; an earlier one means that the clock went back, and forgives nothing.
local function roll(record, params, stepped_back)
  local start = params.window_start
  if start > record[WINDOW_START] then
    record[(4)] = record[(6)]
    record[WINDOW_START] = start
  elseif stepped_back then
    record[WINDOW_START] = start
  end
  record[WINDOW_END] = params.window_end
end

-- R10: count in another unit from now on. The balance is worth as much time as before, debt and surplus alike; where a
-- quota is involved there is no such time, and the balance keeps its share of the capacity.
local function recount(record, params, share, flags, cap)
  local balance, rate, capacity = record[(4)], record[(5)], record[(6)]
  local timeless = params.quota or has(record[(2)], (1))
  record[(2)] = flags
  begin_terms(record, params, share)
  if cap then record[(5)] = cap end
  balance = timeless and balance / capacity * record[(6)] or balance * record[(5)] / rate
  record[(4)] = balance > -(9007199254740992) and balance or -(9007199254740992)
end

-- What a debit of this size can still take before the debt reaches its bound (W5).
local function collectable(record, amount)
  local room = record[(4)] + record[(8)]
  if not (room > 0) then room = 0 end  -- not even minus zero
  if amount > room then return room end
  return amount
end

-- R10: what was settled beyond that for which requests could be counted is owed, as any other work (W5).
local function repay(record, params, share)
  local overrun = record[(17)] - record[(26)]
  if overrun > 0 then
    adopt_bounds(record, params, share)
    record[(4)] = record[(4)] - collectable(record, overrun)
  end
end

-- The kind of bucket that a policy wants now. An auto bucket counts requests only for as much work as it was lent that.
local function convert(record, params, now_us)
  local before, flags = record[(2)], params.flags
  if params.auto and before % (4) == (2)
    and record[(17)] < (record[(26)] or 0) then flags = flags + (2) end
  if before == flags then return end
  local overload = has(before, (32))
  if has(before, (4)) ~= params.histogram or overload ~= params.overload then
    record[(22)] = no_latencies(params)
  end
  if overload ~= params.overload then record[(27)] = params.overload and no_shedding() or nil end
  if has(before, (8)) ~= params.divided then
    record[(23)], record[(24)], record[(25)] = 0, 0, 0
  end
  if has(before, (16)) ~= params.auto then record[(26)] = 0 end
  if before < (64) and params.block_for then
    record[(28)], record[(29)], record[(30)] = 0, 0, 0
  end
  if before % (4) ~= flags % (4) then
    local share = share_of(record, params, now_us)
    recount(record, params, share, flags)
    if params.auto and has(before, (16)) then repay(record, params, share) end
  end
  record[(2)] = flags
end

-- W9: a changed policy, or share of one, reaches the live bucket: debt survives, surplus is clamped, nothing is reset
-- to full.
local function adopt(record, params, now_us)
  if record[(2)] ~= params.flags then convert(record, params, now_us) end
  local share = params.divided and share_of(record, params, now_us) or 1
  local capacity = params.capacity * share
  if params.quota then
    record[(4)] = record[(4)] + (capacity - record[(6)])
  else
    local committed = params.committed * share
    if record[(2)] % (4) ~= (2) then
      record[(5)] = committed
    else
      if record[(7)] ~= committed then
        -- The cap keeps its proportion to the committed rate.
        local cap = record[(5)] * committed / record[(7)]
        record[(5)] = (cap > 0 and cap < (9007199254740992)) and cap or params.cap * share
      end
      capacity = burst_of(params, share, record[(5)])
    end
    record[(7)] = committed
  end
  record[(6)] = capacity
  if record[(4)] > capacity then record[(4)] = capacity end
  adopt_bounds(record, params, share)
end

-- Bring a bucket to now under the old terms, then to the terms of the policy.
local function advance(record, params, now_us)
  local stepped_back = record[(3)] - now_us > (1000000)
  refill(record, now_us)
  if params.quota and has(record[(2)], (1)) then roll(record, params, stepped_back) end
  adopt(record, params, now_us)
end

-- A bucket that would be full again tells nothing: it may go then, but not before it has been idle a while, nor before
-- its share ends: forgotten earlier, it would hold an equal part while the others hold what it gave up.
local function ttl_ms(record, now_us)
  local ms
  local flags = record[(2)]
  if flags % 2 == (1) then
    ms = (record[WINDOW_END] - now_us) / 1000
  else
    ms = (record[(6)] - record[(4)]) / record[(5)] * 1000
  end
  if flags >= (8) and has(flags, (8)) then ms = math.max(ms, (record[(24)] - now_us) / 1000) end
  if flags >= (64) then
    ms = math.max(ms, (record[(28)] - now_us) / 1000, (record[(30)] - now_us) / 1000)
  end
  if not (ms < (31622400000)) then return (31622400000) end
  ms = math.ceil(ms)
  if ms < 0 then ms = 0 end
  return ms + (600000)
end

-- Calendar windows come from the node; one that does not hold the server's time is answered, not used (T4).
local function in_window(params, now_us)
  return not params.quota or (now_us >= params.window_start and now_us < params.window_end)
end

--[[ call: what every batched script does around its operations: know the time, answer a repeat, refuse a call that
comes too late, read each bucket once, write each touched one once, and list it for the controller.
A call that was sent again finds its first reply, so nothing is debited twice (S4). The reply is kept for
(10000); a call carries an expiry well before that, so a copy that the network held back for longer than its
reply lives does nothing either. ]]





local function begin(reply_key, head)
  local reply = call('GET', reply_key)
  if reply then return reply end
  local now_us, expires_us, bucket_count = unpack_struct('<ddH', head)
  if now_us == 0 then
    local time = call('TIME')
    now_us = time[1] * 1000000 + time[2]
  end
  -- An expiry beyond the life of the reply would be none: whoever set it has the wrong idea of our time.
  if expires_us > 0 and (now_us > expires_us or expires_us > now_us + (10000) * 1000) then
    return pack_struct('<Bd', (2), now_us)
  end
  return nil, now_us, bucket_count
end

local function begin_reply(now_us)
  return pack_struct('<Bd', (1), now_us)
end

local function finish(reply_key, answers)
  local reply = table.concat(answers)
  call('SET', reply_key, reply, 'PX', (10000))
  return reply
end

-- Q5: the least slack of the epoch before is kept beside that of this one: a controller that reads a bucket just after
-- it was listed anew finds both. slacks[i] is the least that this call has seen in bucket i.
local function keep_slack(shedding, is_listed, slack)
  if is_listed then shedding[(28)], shedding[(27)] = shedding[(27)], math.huge end
  if slack and slack < shedding[(27)] then shedding[(27)] = slack end
end

-- touched[i] is true for each bucket that an operation changed. What the controller keeps beside the buckets must
-- not stand in their way: were it damaged, the buckets would still be written and the reply still be kept.
local function write_records(records, touched, first, now_us, slacks)
  local sampling = redis.pcall('GET', KEYS[2])
  local epoch, listed = type(sampling) == 'string' and tonumber(sampling) or 0, {}
  for i in pairs(touched) do
    local record, key = records[i], KEYS[first + i - 1]
    local is_listed = record[(12)] ~= epoch
    if is_listed then
      record[(12)] = epoch
      listed[#listed + 1] = key
    end
    if record[(27)] then keep_slack(record[(27)], is_listed, slacks and slacks[i]) end
    call('SET', key, pack_record(record), 'PX', ttl_ms(record, now_us))
  end
  if #listed == 0 then return end
  local length = redis.pcall('RPUSH', KEYS[3], unpack(listed))
  if type(length) ~= 'number' then return end
  if length > (65536) then call('LTRIM', KEYS[3], -(65536), -1) end
  call('PEXPIRE', KEYS[3], (600000))
end









local reply, now_us, bucket_count = begin(KEYS[1], ARGV[1])
if reply then return reply end

local params = unpack_params(ARGV[2])
local records = read_records(KEYS, (4), bucket_count)
local corrupt, touched = {}, {}
for i = 1, bucket_count do
  local term, record = params[unpack_struct('<H', ARGV[3], 2 * i - 1)], records[i]
  if record == nil then
    corrupt[i] = true
  elseif record then
    refill(record, now_us)
  elseif term and in_window(term, now_us) then
    records[i] = fresh_record(term, now_us)  -- forgotten while idle, so it was full
  end
end

-- The operation at hand, with a slot per bucket, and what its tombstone says; reused, as tables are dear.
local final, class, work, requests, latency_ms, expected_ms, acquired_us, deadline_us, late_us
local index, in_requests, charge, weight, expects, unpaid = {}, {}, {}, {}, {}, {}
local state, late, work_before
local expires_us, expired_us  -- the deadline, as far as progress has renewed it; and what it was before this operation
local slacks = {}  -- per bucket: the least of expected - actual in this call, ms
local accounted, uncollected = {}, {}  -- per bucket: what it was debited so far, and what of that it could not pay

local function read_rows(operations, at, count)
  local sound = true
  for i = 1, count do
    local bits
    index[i], bits, charge[i], weight[i], at = unpack_struct('<HBdd', operations, at)
    expects[i], unpaid[i] = expected_ms, 0
    if bits >= (2) then
      if has(bits, (2)) then expects[i], at = unpack_struct('<d', operations, at) end
      if bits >= (4) then unpaid[i], at = unpack_struct('<d', operations, at) end
      bits = bits % (2)
    end
    in_requests[i] = bits
    if corrupt[index[i]] then sound = false end
  end
  return at, sound
end

local tombstones, tombstone_ttls_ms = {}, {}  -- to be written

-- Whether the tombstone could be read: state, late, work so far, deadline, then accounted and uncollected of each bucket.
local function read_tombstone(key, count)
  local raw = tombstones[key] or redis.pcall('GET', key)
  expires_us = deadline_us
  if not raw then
    state, late, work_before = 0, 0, 0
    for i = 1, count do accounted[i], uncollected[i] = charge[i] + unpaid[i], unpaid[i] end
    return true
  end
  if type(raw) == 'table' or #raw ~= 18 + 16 * count then return false end
  local at
  state, late, work_before, expires_us, at = unpack_struct('<BBdd', raw)
  for i = 1, count do accounted[i], uncollected[i], at = unpack_struct('<dd', raw, at) end
  if (state == (1) or state == (2)) and expires_us > 0 and expires_us < (9007199254740992) then return true end
  expires_us = deadline_us
  return false
end

local function keep_tombstone(key, count)
  local raw = pack_struct('<BBdddd', state, late, work_before, expires_us, accounted[1], uncollected[1])
  for i = 2, count do raw = raw .. pack_struct('<dd', accounted[i], uncollected[i]) end
  tombstones[key] = raw
  local ttl_ms = (expires_us + late_us - now_us) / 1000
  tombstone_ttls_ms[key] = ttl_ms < (31622400000) and math.ceil(ttl_ms) + 1 or (31622400000)
end

-- W6. The threshold is in units, or (negative) a share of the charge.
local function within_threshold(record, delta, charged)
  local threshold = record[(9)]
  if threshold < 0 then threshold = -threshold * charged end
  return math.abs(delta) <= threshold
end

-- R10: what one unit of the charge is worth in the bucket as it counts now; nil: nothing. Work charged before the bucket
-- began to count requests is worth as much time as it was then. A request token was the price, whatever the work.
local function worth(record, i)
  local counts_requests = has(record[(2)], (2))
  if counts_requests == (in_requests[i] == 1) then return 1 end
  if not counts_requests or has(record[(2)], (1)) then return nil end
  local tokens = record[(5)] / record[(7)]
  return tokens > 0 and tokens < math.huge and tokens or nil
end

-- W5, R9: bring what one bucket was debited to the target; what the debt bound cuts off is counted.
local function correct(record, i, target, worth_each, refundable)
  local delta = target - accounted[i]
  if delta > 0 then
    local owed = delta * worth_each
    local taken = collectable(record, owed)
    record[(4)] = record[(4)] - taken
    local lost = (owed - taken) / worth_each
    uncollected[i] = uncollected[i] + lost
    record[(21)] = record[(21)] + lost
    accounted[i] = target
  elseif delta < 0 then
    -- Work that was not done was not left unpaid either, however late we hear of it.
    local forgiven = math.min(-delta, uncollected[i])
    uncollected[i] = uncollected[i] - forgiven
    record[(21)] = record[(21)] - forgiven
    if refundable then
      record[(4)] = math.min(record[(4)] + (-delta - forgiven) * worth_each, record[(6)])
      accounted[i] = target
    else
      accounted[i] = accounted[i] - forgiven
    end
  end
end

-- Four steps to an octave, by exponent and mantissa: no logarithm, so the model agrees to the bit.
local function count_latency(record)
  local step = 0
  if latency_ms >= 0.125 then
    local mantissa, exponent = math.frexp(latency_ms)
    step = (exponent - (-2)) * (4) + math.floor((mantissa - 0.5) * 2 * (4))
    if step >= (18) * (4) then step = (18) * (4) - 1 end
  end
  local counts, at = record[(22)], step * 8 + 1
  if record[(27)] then at = at + class * HISTOGRAM_SIZE end
  record[(22)] = string.sub(counts, 1, at - 1) .. pack_struct('<d', unpack_struct('<d', counts, at) + 1)
    .. string.sub(counts, at + 8)
end

-- Q2, Q5: how a class fares against what it expects.
local function count_class(shedding, i)
  shedding[(19) + class] = shedding[(19) + class] + 1
  if latency_ms > expects[i] then shedding[(23) + class] = shedding[(23) + class] + 1 end
  local slack, least = expects[i] - latency_ms, slacks[index[i]] or math.huge
  if slack < least then slacks[index[i]] = slack end
end

-- Whatever is final is counted once.
local function count(record, target, i)
  record[(19)] = record[(19)] + requests
  -- Less than one request would make the square as large as it likes.
  if requests >= 1 then record[(18)] = record[(18)] + target * target / requests end
  if latency_ms > expects[i] then record[(20)] = record[(20)] + 1 end
  if record[(22)] ~= '' and latency_ms >= 0 then count_latency(record) end
  if record[(27)] and latency_ms >= 0 then count_class(record[(27)], i) end
end

local function settle_bucket(record, i)
  local target, worth_each = work * weight[i], worth(record, i)
  record[(17)] = record[(17)] + (work - work_before) * weight[i]
  if final == 0 then
    if worth_each and in_requests[i] == 0 and target > accounted[i] then
      correct(record, i, target, worth_each, false)
    end
    return
  end
  count(record, target, i)
  if not worth_each then return end
  if in_requests[i] == 1 then target = requests end
  if within_threshold(record, target - accounted[i], charge[i]) then return end
  -- A refund never reaches past a quota's window: what it would give back belongs to a period that is over.
  local same_window = not has(record[(2)], (1)) or acquired_us >= record[WINDOW_START]
  correct(record, i, target, worth_each, late == 0 and same_window)
end

local function move(buckets)
  late = now_us > expires_us and 1 or 0
  for i = 1, buckets do
    local record = records[index[i]]
    if record then
      settle_bucket(record, i)
      touched[index[i]] = true
    end
  end
  state, work_before = final == 1 and (2) or (1), work
end

-- R2, R3, R12: what has been settled stays; progress counts by its highest mark.
local function standing()
  if state == (2) then return (final == 1 and work ~= work_before) and (3) or (2) end
  if state == (1) and final == 0 and work <= work_before then return (2) end
  return (1)
end

local function answer(status, buckets)
  local stop, rows = 0, {}
  for i = 1, buckets do
    local record, adjusted = records[index[i]], accounted[i] - charge[i]
    if record then
      if record[(4)] < -record[(10)] then stop = 1 end
      local present = has(record[(2)], (2)) and (1) + (2) or (1)
      rows[i] = pack_struct('<Bddddd', present, record[(4)], adjusted, uncollected[i], record[(5)], record[(6)])
    else
      rows[i] = pack_struct('<Bddddd', 0, 0, adjusted, uncollected[i], 0, 0)
    end
  end
  return pack_struct('<BBBddd', status, late, stop, work_before, expires_us, expired_us) .. table.concat(rows)
end

local function settle(tombstone, buckets, sound)
  local readable = read_tombstone(tombstone, buckets)
  if now_us > expires_us + late_us then return string.char((4)) end
  if not (sound and readable) then return string.char((5)) end
  expired_us = expires_us
  local status = standing()
  if status == (1) then move(buckets) end
  if state == (1) then
    -- W14: progress moves the deadline to a whole time to live from now.
    local renewed_us = now_us + (deadline_us - acquired_us)
    if renewed_us > expires_us then expires_us = renewed_us end
  end
  if status == (1) or state == (1) then keep_tombstone(tombstone, buckets) end
  return answer(status, buckets)
end

local operations, at, answers = ARGV[4], 1, { begin_reply(now_us) }
local size = #operations
while at <= size do
  local tombstone, buckets, sound
  tombstone, final, buckets, work, requests, latency_ms, expected_ms, acquired_us, deadline_us, late_us, at =
    unpack_struct('<HBBddddddd', operations, at)
  class = 0
  if final >= (2) then
    class = math.floor(final / (2))
    final = final % (2)
  end
  at, sound = read_rows(operations, at, buckets)
  answers[#answers + 1] = settle(KEYS[(4) + bucket_count + tombstone - 1], buckets, sound)
end

write_records(records, touched, (4), now_us, slacks)
for key, raw in pairs(tombstones) do call('SET', key, raw, 'PX', tombstone_ttls_ms[key]) end
return finish(KEYS[1], answers)
