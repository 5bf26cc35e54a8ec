--[[ record: the live state of one bucket, kept as one string.
Layout: version byte, flags byte, 19 little-endian float64 fields, then a latency histogram where the policy
needs one. Everything stays float64: nothing passes through text, so the model in limiter/model/bucket.py, doing
the same operations in the same order, agrees to the bit. limiter/store/layout.py packs the same bytes. ]]

local pack_struct, unpack_struct, call = struct.pack, struct.unpack, redis.call

local VERSION, FLAGS = 1, 2
local UPDATED = 3      -- us, when the balance was last brought up to date
local BALANCE = 4      -- units of work, or requests; negative is debt; a quota's remainder
local RATE = 5         -- refill a second: the committed rate, or the steered cap of a request bucket
local CAPACITY = 6     -- most the balance may be: capacity, burst, or a quota's limit
local COMMITTED = 7    -- the policy's rate when last seen
local DEBT_MAX = 8
local THRESHOLD = 9    -- W6: units if positive, a share of the charge if negative
local STOP_DEBT = 10   -- W7: debt beyond which a progress call answers stop
local CHARGE = 11      -- W8: learned charge, 0 while nothing is learned
local EPOCH = 12       -- the sampling epoch in which this bucket was last listed as touched
local REQUESTS, ADMITTED, REFUSED = 13, 14, 15
local WORK_CHARGED, WORK_SETTLED, WORK_SQUARED = 16, 17, 18
local SETTLES, MISSED, UNCOLLECTED = 19, 20, 21
local HISTOGRAM = 22   -- raw counts, '' where the policy needs none
local WINDOW_END, WINDOW_START = RATE, COMMITTED  -- a quota has a window where a rate bucket has rates (us)

local LAYOUT = 1
local FIELDS = '<BB' .. string.rep('d', 19)
local SIZE = 2 + 19 * 8
local QUOTA, COUNTS_REQUESTS, HAS_HISTOGRAM = 1, 2, 4  -- flag bits a record shares with its params

local OCTAVES, OCTAVE_MIN, STEPS = 18, -2, 4  -- histogram: 0.125 ms to 32 s, four steps to an octave
local HISTOGRAM_SIZE = OCTAVES * STEPS * 8

local STEP_BACK_MAX_US = 1000000     -- a clock this far back waits for the past to catch up; further back re-anchors
local IDLE_TTL_MS = 600000           -- a bucket is kept at least this long after its last use
local TTL_MAX_MS = 31622400000       -- and at most 366 days
local RATE_MAX = 9007199254740992    -- 2^53

local function has(flags, bit_value)
  return flags % (bit_value * 2) >= bit_value
end

--[[ Params: what a policy says of a bucket, one fixed-size row each (limiter/store/layout.py). ]]
local PARAMS, PARAMS_SIZE = '<Bddddddddd', 73
local SHADOW = 8

local function unpack_params(rows)
  local params = {}
  for at = 1, #rows, PARAMS_SIZE do
    local flags, committed, rate, capacity, burst_s, debt_max, threshold, stop_debt, window_start, window_end =
      unpack_struct(PARAMS, rows, at)
    params[#params + 1] = {
      flags = flags % SHADOW, quota = has(flags, QUOTA), counts_requests = has(flags, COUNTS_REQUESTS),
      shadow = has(flags, SHADOW), histogram = has(flags, HAS_HISTOGRAM),
      committed = committed, rate = rate, capacity = capacity, burst_s = burst_s, debt_max = debt_max,
      threshold = threshold, stop_debt = stop_debt, window_start = window_start, window_end = window_end,
    }
  end
  return params
end

-- R7: a burst given as time at the cap follows the cap; fewer than one token could never admit anything.
local function capacity_of(params, rate)
  if not params.counts_requests or params.quota then return params.capacity end
  return math.max(1, params.capacity + params.burst_s * rate)
end

local function fresh_record(params, now_us)
  local rate, committed = params.rate, params.committed
  if params.quota then rate, committed = params.window_end, params.window_start end
  local capacity = capacity_of(params, rate)
  return { LAYOUT, params.flags, now_us, capacity, rate, capacity, committed, params.debt_max, params.threshold,
    params.stop_debt, 0, -1, 0, 0, 0, 0, 0, 0, 0, 0, 0, params.histogram and string.rep('\0', HISTOGRAM_SIZE) or '' }
end

-- S11: nil means that these bytes are not a record of ours.
local function unpack_record(raw)
  local size = #raw
  if size ~= SIZE and size ~= SIZE + HISTOGRAM_SIZE then return nil end
  local record = { unpack_struct(FIELDS, raw) }
  local balance, rate, capacity = record[BALANCE], record[RATE], record[CAPACITY]
  if record[VERSION] ~= LAYOUT or (size ~= SIZE) ~= has(record[FLAGS], HAS_HISTOGRAM) then return nil end
  -- Written so that NaN fails as well.
  if not (balance > -math.huge and balance <= capacity and capacity > 0 and capacity < math.huge
    and rate >= 0 and rate < math.huge and record[UPDATED] > 0) then return nil end
  record[HISTOGRAM] = size == SIZE and '' or string.sub(raw, SIZE + 1)
  return record
end

local function pack_record(record)
  local fields = pack_struct(FIELDS, unpack(record, 1, 21))
  if record[HISTOGRAM] == '' then return fields end
  return fields .. record[HISTOGRAM]
end

-- W1, T1, T2: credit for the time since the last update; none for a clock that went back.
local function refill(record, now_us)
  local elapsed_us = now_us - record[UPDATED]
  if elapsed_us > 0 then
    if not has(record[FLAGS], QUOTA) then
      local balance, capacity = record[BALANCE] + elapsed_us * record[RATE] / 1e6, record[CAPACITY]
      if balance > capacity then balance = capacity end
      record[BALANCE] = balance
    end
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

-- A policy that changed its mechanism keeps the share of its capacity that was left, debt included (R10).
local function convert(record, params)
  local renewed = fresh_record(params, record[UPDATED])
  if record[FLAGS] % HAS_HISTOGRAM ~= params.flags % HAS_HISTOGRAM then
    record[BALANCE] = record[BALANCE] / record[CAPACITY] * renewed[CAPACITY]
    record[RATE], record[CAPACITY], record[COMMITTED] = renewed[RATE], renewed[CAPACITY], renewed[COMMITTED]
  end
  record[FLAGS], record[HISTOGRAM] = params.flags, renewed[HISTOGRAM]
end

-- W9: a changed policy reaches the live bucket: debt survives, surplus is clamped, nothing is reset to full.
local function adopt(record, params)
  if record[FLAGS] ~= params.flags then convert(record, params) end
  if params.quota then
    record[BALANCE] = record[BALANCE] + (params.capacity - record[CAPACITY])
    record[CAPACITY] = params.capacity
  else
    if not params.counts_requests then
      record[RATE] = params.rate
    elseif record[COMMITTED] ~= params.committed then
      -- The cap keeps its proportion to the committed rate.
      local cap = record[RATE] * params.committed / record[COMMITTED]
      record[RATE] = (cap > 0 and cap < RATE_MAX) and cap or params.rate
    end
    record[COMMITTED] = params.committed
    record[CAPACITY] = capacity_of(params, record[RATE])
  end
  if record[BALANCE] > record[CAPACITY] then record[BALANCE] = record[CAPACITY] end
  record[DEBT_MAX], record[THRESHOLD], record[STOP_DEBT] = params.debt_max, params.threshold, params.stop_debt
end

-- Bring a bucket to now under the old terms, then to the terms of the policy.
local function advance(record, params, now_us)
  local stepped_back = record[UPDATED] - now_us > STEP_BACK_MAX_US
  refill(record, now_us)
  if params.quota and has(record[FLAGS], QUOTA) then roll(record, params, stepped_back) end
  adopt(record, params)
end

-- What a debit of this size can still take before the debt reaches its bound (W5).
local function collectable(record, amount)
  local room = record[BALANCE] + record[DEBT_MAX]
  if not (room > 0) then room = 0 end  -- not even minus zero
  if amount > room then return room end
  return amount
end

-- A bucket that would be full again tells nothing: it may go then, but not before it has been idle a while.
local function ttl_ms(record, now_us)
  local ms
  if has(record[FLAGS], QUOTA) then
    ms = (record[WINDOW_END] - now_us) / 1000
  else
    ms = (record[CAPACITY] - record[BALANCE]) / record[RATE] * 1000
  end
  if not (ms < TTL_MAX_MS) then return TTL_MAX_MS end
  ms = math.ceil(ms)
  if ms < 0 then ms = 0 end
  return ms + IDLE_TTL_MS
end

-- Calendar windows come from the node; one that does not hold the server's time is answered, not used (T4).
local function in_window(params, now_us)
  return not params.quota or (now_us >= params.window_start and now_us < params.window_end)
end
