#!lua
--[[ acquire: admit or refuse a batch of requests, each over all its buckets or none (P5).
KEYS[1]   reply         string, this call's reply, kept so that a repeat debits nothing
KEYS[2]   sampling      string, number of the sampling epoch, moved by the controller
KEYS[3]   touched       list of the buckets changed since the last sampling
KEYS[4..] buckets       string records, see lib/record.lua; after them the idempotency keys that operations name
ARGV[1]   head          now_us (0 = server clock; only tests send one), expires_us (0 = never), number of buckets
ARGV[2]   params        rows of policy parameters, see lib/record.lua
ARGV[3]   terms         for each bucket the number of its row in params
ARGV[4]   operations    flags, buckets, requests; a row per bucket; where a bucket has overload control the request's
                        class and a draw in [0, 1); an idempotency key's number, fingerprint and memo
RETURNS   one string: done or expired, now_us, then for each operation its status and a row per bucket: verdict and
          unit, balance, charge (of a key that is blocked: for how long, us), rate, capacity; of an operation with a
          draw (status + (16)) also overloaded, quality, and the class's share refused and rate;
          limiter/store/layout.py reads it
HOLDS     a repeated call changes nothing; a refusal spends nothing; balance <= capacity; a debit stops at -debt_max and
          counts the rest; each bucket is read once and written once; what is not ours is left as it is ]]

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
local terms, unusable, touched = {}, {}, {}
local unit, part = {}, {}  -- per bucket: (4) or 0, and how much of the whole limit's capacity it holds
for i = 1, bucket_count do
  local term, record = params[unpack_struct('<H', ARGV[3], 2 * i - 1)], records[i]
  terms[i] = term
  if record == nil then
    unusable[i] = (2)
  elseif not in_window(term, now_us) then
    unusable[i] = (3)
  else
    if record then
      advance(record, term, now_us)
    else
      record = fresh_record(term, now_us)
      records[i] = record
    end
    unit[i] = has(record[(2)], (2)) and (4) or 0
    part[i] = record[(6)] / term.whole_capacity
  end
end

-- The operation at hand, a slot per bucket: reused, because a table per operation costs more than the decision.
local index, how, minimum, charge, verdict = {}, {}, {}, {}, {}

-- Minimums are for the whole capacity: a bucket that holds a part of it, or counts in another unit, asks for as much of
-- its own. One token stays one token, lest a part admit on a splinter of it, or never.
local function part_of(whole, held, capacity)
  local need = whole * held
  if whole <= 0 then return need end
  if held > 1 and whole <= 1 then return whole end
  local least = whole < 1 and whole or 1
  if least > capacity then least = capacity end
  return need > least and need or least
end

-- W17: how long a key is still blocked, 0 if it is not. A clock that went back makes no block longer.
local function blocked_us(record, params, now_us)
  local left = record[(30)] - now_us
  if left > params.block_for then left = params.block_for end
  return left > 0 and left or 0
end

-- W17: count a refusal by the policy's own limit, and begin a block if it was one too many.
local function count_refusal(record, params, requests, now_us)
  local left = record[(28)] - now_us
  if not (left > 0 and left <= params.block_in) then
    record[(28)], record[(29)] = now_us + params.block_in, 0
  end
  record[(29)] = record[(29)] + requests
  if record[(29)] >= params.block_after then
    record[(28)], record[(29)], record[(30)] = 0, 0, now_us + params.block_for
  end
end

-- W3, W13. What is taken must be within the debt bound, or a minimum below it would be no limit at all; a charge that no
-- balance could pay waits for a full bucket. A quota is absolute (P4): it has to cover the charge as well, and so has a
-- bucket that is asked to, but for what was learned: more than it holds would never be there. A lease (P9) takes only the
-- share of what it wants that every bucket can give while keeping its minimum.
local function judge(count, requests, leased)
  local granted, share = true, 1
  for i = 1, count do
    local at = index[i]
    local record, term, need, want, asked = records[at], terms[at], minimum[i], charge[i], how[i]
    local balance, passed = record[(4)], true
    if part[at] ~= 1 then
      need = part_of(need, part[at], record[(6)])
      minimum[i] = need
    end
    if unit[at] ~= 0 then
      want = requests
      if asked >= (4) then asked = asked - (4) end
    elseif asked ~= 0 and asked % 2 == (1) and record[(11)] > 0 then
      want = record[(11)]
      local most = record[(6)] + record[(8)]
      if want > most and not term.quota then want = most end
      charge[i] = want
    end
    if leased then
      local available = balance - need
      passed = available > 0
      if passed and want * share > available and not term.shadow then share = available / want end
    else
      local cover = want
      if not term.quota then
        local capacity = record[(6)]
        if asked < (4) then cover = want - record[(8)] end
        if cover > capacity and (asked < (4) or asked % 2 == (1)) then cover = capacity end
      end
      passed = balance >= need and balance >= cover and (asked < (2) or not has(asked, (2)))
    end
    verdict[i] = passed and (0) or (2)
    if term.block_for then
      local left_us = blocked_us(record, term, now_us)
      if left_us > 0 then passed, verdict[i], charge[i] = false, (8), left_us end
    end
    if not (passed or term.shadow) then granted = false end
  end
  return granted, share
end

-- Debit every bucket of a granted operation; one that only watches (P11) takes part as long as it would admit.
local function commit(count, requests, granted, share)
  for i = 1, count do
    local at = index[i]
    local record = records[at]
    touched[at] = true
    record[(13)] = record[(13)] + requests
    if verdict[i] >= (2) then
      if verdict[i] ~= (3) then record[(15)] = record[(15)] + requests end
      if verdict[i] == (2) and terms[at].block_for then count_refusal(record, terms[at], requests, now_us) end
    elseif granted then
      local balance, taken = record[(4)], (unit[at] ~= 0 and requests or charge[i]) * share
      if share < 1 and taken > balance - minimum[i] then taken = balance - minimum[i] end
      local wanted = taken
      taken = collectable(record, taken)
      record[(4)] = balance - taken
      if taken < wanted then record[(21)] = record[(21)] + (wanted - taken) end
      record[(14)] = record[(14)] + requests * share
      record[(16)] = record[(16)] + (unit[at] ~= 0 and charge[i] * share or taken)
      verdict[i], charge[i] = (1), taken
    end
  end
end

local function answer(count, status)
  local at = index[1]
  local record = records[at]
  local rows = pack_struct('<BBdddd', status, verdict[1] + unit[at], record[(4)], charge[1], record[(5)],
    record[(6)])
  for i = 2, count do
    at = index[i]
    record = records[at]
    rows = rows .. pack_struct('<Bdddd', verdict[i] + unit[at], record[(4)], charge[i], record[(5)],
      record[(6)])
  end
  return rows
end

-- The class of the operation at hand and the chance it was given; only where a bucket has overload control.
local class, draw

-- Q4, S3: whether overload control turns the request away. A lease takes no more than the class may send now.
local function turns_away(shedding, requests, leased, share)
  if draw < shedding[(3) + class] then return true, share end
  if shedding[(7) + class] == 0 then return false, share end
  local tokens = shedding[(11) + class]
  if not leased then return tokens < 1, share end
  if requests * share > tokens then share = tokens / requests end
  return tokens <= 0, share
end

-- Overload control has the last word, so that the share it refuses is that of all requests.
local function shed(count, requests, leased, share)
  local granted = true
  for i = 1, count do
    local at = index[i]
    local shedding = records[at][(27)]
    if shedding then
      local turned_away, rest = turns_away(shedding, requests, leased, share)
      if turned_away and verdict[i] ~= (8) then
        verdict[i] = (3)
      elseif not terms[at].shadow then
        share = rest
      end
    end
    if verdict[i] >= (2) and not terms[at].shadow then granted = false end
  end
  return granted, share
end

local function commit_classes(count, requests, share)
  for i = 1, count do
    local shedding = records[index[i]][(27)]
    if shedding and verdict[i] == (3) then
      shedding[(15) + class] = shedding[(15) + class] + requests
    elseif shedding and verdict[i] == (1) and shedding[(7) + class] > 0 then
      local tokens, taken = shedding[(11) + class], requests * share
      shedding[(11) + class] = taken < tokens and tokens - taken or 0
    end
  end
end

local function answer_drawn(count, status)
  local rows = string.char(status + (16))
  for i = 1, count do
    local at = index[i]
    local record, overloaded, quality, refused_share, rate = records[at], 0, 1, 0, 0
    local shedding = record[(27)]
    if shedding then
      overloaded, quality = shedding[(2)], shedding[(1)]
      refused_share, rate = shedding[(3) + class], shedding[(7) + class]
    end
    rows = rows .. pack_struct('<BddddBddd', verdict[i] + unit[at], record[(4)], charge[i], record[(5)],
      record[(6)], overloaded, quality, refused_share, rate)
  end
  return rows
end

local function decide_drawn(flags, count, requests)
  local leased = has(flags, (1))
  local _, share = judge(count, requests, leased)
  local granted
  granted, share = shed(count, requests, leased, share)
  if not has(flags, (2)) then
    commit(count, requests, granted, share)
    commit_classes(count, requests, share)
  end
  return answer_drawn(count, granted and (1) or (0))
end

local function decide(flags, count, requests)
  if flags >= (4) and has(flags, (4)) then return decide_drawn(flags, count, requests) end
  local granted, share = judge(count, requests, flags ~= 0 and has(flags, (1)))
  if flags == 0 or not has(flags, (2)) then commit(count, requests, granted, share) end
  return answer(count, granted and (1) or (0))
end

-- A decision that was kept: layout, fingerprint, now_us, memo, then the answer. nil: none yet; false: not ours (S11).
local decided = {}
local function recall(key)
  local kept = decided[key] or redis.pcall('GET', key)
  if not kept then return nil end
  if type(kept) == 'table' or #kept < (29) or string.byte(kept) ~= (1) then return false end
  local _, fingerprint, _, memo_size = unpack_struct('<Bc16dI', kept)
  local answer_size = #kept - (29) - memo_size
  if answer_size < 1 then return false end
  local row_size = string.byte(kept, (29) + memo_size + 1) >= (16) and (58) or (33)
  if (answer_size - 1) % row_size ~= 0 then return false end
  return fingerprint, string.sub(kept, 2 + (16))
end

-- R7, R8: the first decision under an idempotency key stands; the memo lets any node rebuild the whole answer.
local function decide_once(key, fingerprint, memo, flags, count, requests)
  local first_fingerprint, first = recall(key)
  if first_fingerprint == false then return string.char((2)) end
  if first_fingerprint == nil then
    local decision = decide(flags, count, requests)
    decided[key] = pack_struct('<Bc16dI', (1), fingerprint, now_us, #memo) .. memo .. decision
    return decision
  end
  if first_fingerprint ~= fingerprint then return string.char((4)) end
  return pack_struct('<BI', (5), #first) .. first
end

local operations, at, answers, answered = ARGV[4], 1, { begin_reply(now_us) }, 1
local size = #operations
while at <= size do
  local flags, count, requests, status, key, fingerprint, memo
  flags, count, requests, index[1], how[1], minimum[1], charge[1], at = unpack_struct('<BBdHBdd', operations, at)
  status = unusable[index[1]]
  for i = 2, count do
    index[i], how[i], minimum[i], charge[i], at = unpack_struct('<HBdd', operations, at)
    status = status or unusable[index[i]]
  end
  if flags >= (4) and has(flags, (4)) then class, draw, at = unpack_struct('<Bd', operations, at) end
  if flags >= (8) then
    key, fingerprint, memo, at = unpack_struct('<Hc16Ic0', operations, at)
    key = KEYS[(4) + bucket_count + key - 1]
  end
  answered = answered + 1
  if status then
    answers[answered] = string.char(status)
  elseif key then
    answers[answered] = decide_once(key, fingerprint, memo, flags, count, requests)
  else
    answers[answered] = decide(flags, count, requests)
  end
end

write_records(records, touched, (4), now_us)
for key, decision in pairs(decided) do call('SET', key, decision, 'PX', (60000)) end
return finish(KEYS[1], answers)
