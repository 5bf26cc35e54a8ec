#!lua flags=allow-oom
--[[ settle: correct what acquires charged, each reservation once; or debit a long request as it goes (W5-W7).
Runs without memory to spare too (allow-oom): a store that is full must still take back what is owed.
KEYS[1]   reply         string, this call's reply, kept so that a repeat changes nothing
KEYS[2]   sampling      string, number of the sampling epoch, moved by the controller
KEYS[3]   touched       list of the buckets changed since the last sampling
KEYS[4..] buckets       string records, see lib/record.lua; after them a tombstone for each reservation, which lives
                        until its deadline plus SETTLE_GRACE_US
ARGV[1]   head          now_us (0 = server clock; only tests send one), expires_us (0 = never), number of buckets
ARGV[2]   params        rows of policy parameters, see lib/record.lua
ARGV[3]   terms         for each bucket the number of its row in params, 0 where its policy is gone
ARGV[4]   operations    tombstone, final, buckets, work, requests, latency_ms, expected_ms, acquired_us, deadline_us;
                        a row per bucket: number, charge, weight
RETURNS   one string: done or expired, now_us, then for each operation its status, late, stop, work and a row per
          bucket: present, balance, adjusted, uncollected, rate, capacity; limiter/store/layout.py reads it
HOLDS     a repeat changes nothing; refill before refund; balance <= capacity; a debit stops at -debt_max and counts
          the rest; after the deadline nothing is refunded; what is not ours is left as it is ]]

-- #include lib/record.lua
-- #include lib/call.lua

local FIRST = 4
local OP_SETTLED, OP_DUPLICATE, OP_CONFLICT, OP_GONE, OP_CORRUPT = 1, 2, 3, 4, 5
local OPEN, FINAL = 1, 2
local SETTLE_GRACE_US = 60000000  -- how long after its deadline a reservation may still be settled

local reply, now_us, bucket_count = begin(KEYS[1], ARGV[1])
if reply then return reply end

local params = unpack_params(ARGV[2])
local records = read_records(KEYS, FIRST, bucket_count)
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

-- The operation at hand, a slot per bucket.
local index, charge, weight = {}, {}, {}

local function read_rows(operations, at, count)
  local sound = true
  for i = 1, count do
    index[i], charge[i], weight[i], at = unpack_struct('<Hdd', operations, at)
    if corrupt[index[i]] then sound = false end
  end
  return at, sound
end

-- A tombstone: state, late, work so far, then for each bucket what was accounted and what of that was not collected.
local tombstones = {}

local function read_tombstone(key, count)
  if tombstones[key] then return tombstones[key] end
  local raw = redis.pcall('GET', key)
  if not raw then
    local mark = { state = 0, late = 0, work = 0, accounted = {}, uncollected = {} }
    for i = 1, count do mark.accounted[i], mark.uncollected[i] = charge[i], 0 end
    return mark
  end
  if type(raw) == 'table' or #raw ~= 10 + 16 * count then return nil end
  local state, late, work, at = unpack_struct('<BBd', raw)
  local mark = { state = state, late = late, work = work, accounted = {}, uncollected = {} }
  for i = 1, count do mark.accounted[i], mark.uncollected[i], at = unpack_struct('<dd', raw, at) end
  return mark
end

local function write_tombstone(key, mark, deadline_us)
  local raw = pack_struct('<BBd', mark.state, mark.late, mark.work)
  for i = 1, #mark.accounted do raw = raw .. pack_struct('<dd', mark.accounted[i], mark.uncollected[i]) end
  call('SET', key, raw, 'PX', math.ceil((deadline_us + SETTLE_GRACE_US - now_us) / 1000) + 1)
end

-- W6. The threshold is in units, or (negative) a share of the charge.
local function within_threshold(record, delta, charged)
  local threshold = record[THRESHOLD]
  if threshold < 0 then threshold = -threshold * charged end
  return math.abs(delta) <= threshold
end

-- W5, R9: bring what one bucket was debited to the target; what the debt bound cuts off is counted.
local function correct(record, mark, i, target, refundable)
  local delta = target - mark.accounted[i]
  if delta > 0 then
    local taken = collectable(record, delta)
    record[BALANCE] = record[BALANCE] - taken
    mark.uncollected[i] = mark.uncollected[i] + (delta - taken)
    record[UNCOLLECTED] = record[UNCOLLECTED] + (delta - taken)
  elseif delta < 0 and refundable then
    local forgiven = math.min(-delta, mark.uncollected[i])
    mark.uncollected[i] = mark.uncollected[i] - forgiven
    record[UNCOLLECTED] = record[UNCOLLECTED] - forgiven
    record[BALANCE] = math.min(record[BALANCE] + (-delta - forgiven), record[CAPACITY])
  else
    return
  end
  mark.accounted[i] = target
end

-- Four steps to an octave, by exponent and mantissa: no logarithm, so the model agrees to the bit.
local function count_latency(record, latency_ms)
  local step = 0
  if latency_ms >= 0.125 then
    local mantissa, exponent = math.frexp(latency_ms)
    step = (exponent - OCTAVE_MIN) * STEPS + math.floor((mantissa - 0.5) * 2 * STEPS)
    if step >= OCTAVES * STEPS then step = OCTAVES * STEPS - 1 end
  end
  local counts, at = record[HISTOGRAM], step * 8 + 1
  record[HISTOGRAM] = string.sub(counts, 1, at - 1) .. pack_struct('<d', unpack_struct('<d', counts, at) + 1)
    .. string.sub(counts, at + 8)
end

local function settle_bucket(record, mark, i, op)
  local target = op.work * weight[i]
  record[WORK_SETTLED] = record[WORK_SETTLED] + (op.work - mark.work) * weight[i]
  if not op.final then
    if not has(record[FLAGS], COUNTS_REQUESTS) and target > mark.accounted[i] then correct(record, mark, i, target) end
    return
  end
  record[SETTLES] = record[SETTLES] + op.requests
  if op.requests > 0 then record[WORK_SQUARED] = record[WORK_SQUARED] + target * target / op.requests end
  if op.latency_ms > op.expected_ms then record[MISSED] = record[MISSED] + 1 end
  if record[HISTOGRAM] ~= '' and op.latency_ms >= 0 then count_latency(record, op.latency_ms) end
  if has(record[FLAGS], COUNTS_REQUESTS) then target = op.requests end
  if within_threshold(record, target - mark.accounted[i], charge[i]) then return end
  -- A refund never reaches past a quota's window: what it would give back belongs to a period that is over.
  local same_window = not has(record[FLAGS], QUOTA) or op.acquired_us >= record[WINDOW_START]
  correct(record, mark, i, target, mark.late == 0 and same_window)
end

local function move(mark, op, count)
  if now_us > op.deadline_us then mark.late = 1 end
  for i = 1, count do
    local record = records[index[i]]
    if record then
      settle_bucket(record, mark, i, op)
      touched[index[i]] = true
    end
  end
  mark.work = op.work
  mark.state = op.final and FINAL or OPEN
end

-- R2, R3, R12: what has been settled stays; progress counts by its highest mark.
local function standing(mark, op)
  if mark.state == FINAL then return (op.final and op.work ~= mark.work) and OP_CONFLICT or OP_DUPLICATE end
  if mark.state == OPEN and not op.final and op.work <= mark.work then return OP_DUPLICATE end
  return OP_SETTLED
end

local function answer(status, mark, count)
  local stop, rows = 0, {}
  for i = 1, count do
    local record = records[index[i]]
    local adjusted = mark.accounted[i] - charge[i]
    if record then
      if record[BALANCE] < -record[STOP_DEBT] then stop = 1 end
      rows[i] = pack_struct('<Bddddd', 1, record[BALANCE], adjusted, mark.uncollected[i], record[RATE], record[CAPACITY])
    else
      rows[i] = pack_struct('<Bddddd', 0, 0, adjusted, mark.uncollected[i], 0, 0)
    end
  end
  return pack_struct('<BBBd', status, mark.late, stop, mark.work) .. table.concat(rows)
end

local function settle(op, count, sound)
  if now_us > op.deadline_us + SETTLE_GRACE_US then return string.char(OP_GONE) end
  local mark = sound and read_tombstone(op.tombstone, count)
  if not mark then return string.char(OP_CORRUPT) end
  local status = standing(mark, op)
  if status == OP_SETTLED then
    move(mark, op, count)
    tombstones[op.tombstone] = mark
    mark.deadline_us = op.deadline_us
  end
  return answer(status, mark, count)
end

local operations, at, answers = ARGV[4], 1, { begin_reply(now_us) }
while at <= #operations do
  local op, tombstone, final, count, sound = {}, nil, nil, nil, nil
  tombstone, final, count, op.work, op.requests, op.latency_ms, op.expected_ms, op.acquired_us, op.deadline_us, at =
    unpack_struct('<HBBdddddd', operations, at)
  op.tombstone, op.final = KEYS[FIRST + bucket_count + tombstone - 1], final == 1
  at, sound = read_rows(operations, at, count)
  answers[#answers + 1] = settle(op, count, sound)
end

write_records(records, touched, FIRST, now_us)
for key, mark in pairs(tombstones) do write_tombstone(key, mark, mark.deadline_us) end
return finish(KEYS[1], answers)
