#!lua flags=allow-oom
--[[ settle: correct what acquires charged, each reservation once; or debit a long request as it goes (W5-W7).
It also runs when the store is out of memory (allow-oom), so that reservations can always be settled.
KEYS[1]   reply         string, this call's reply, kept so that a repeat changes nothing
KEYS[2]   sampling      string, number of the sampling epoch, moved by the controller
KEYS[3]   touched       list of the buckets changed since the last sampling
KEYS[4..] buckets       string records, see lib/record.lua; after them a tombstone for each reservation
ARGV[1]   head          now_us (0 = server clock; only tests send one, below 0 to have the general form decide),
                        expires_us (0 = never), number of buckets
ARGV[2]   params        rows of policy parameters, see lib/record.lua
ARGV[3]   terms         for each bucket the number of its row in params, 0 where its policy is gone
ARGV[4]   operations    tombstone, final, class and whether the store granted it (bits), buckets, work, requests, latency_ms, expected_ms, acquired_us,
                        deadline_us, late_us; a row per bucket: number, bits, charge, weight, and if bits say so its own
                        expected_ms, what the acquire could not collect, the id of its values of learn_by, and how much of
                        the reported work makes a unit
RETURNS   one string: done or expired, now_us, then for each operation its status, late, stop, work, deadline_us now and
          before the call, and a row per bucket: present and unit, balance, adjusted, uncollected, rate, capacity;
          limiter/store/call_layout.py reads it
HOLDS     a repeat changes nothing; refill before refund; balance <= capacity; a debit stops at -debt_max and counts
          the rest; after the deadline nothing is refunded; progress renews the deadline; bytes of an unknown form are
          not changed ]]

local BEFORE = 3  -- keys before those of the buckets
local OP_SETTLED, OP_DUPLICATE, OP_CONFLICT, OP_GONE, OP_CORRUPT = 1, 2, 3, 4, 5
local OPEN, FINAL = 1, 2
local IN_CLASS = 2  -- times the class (0 to 3), beside final
local UNCOUNTED = 8  -- beside both: granted without the store, so it takes no place there
local EXPECTS, UNPAID, KEYED, MEASURED = 2, 4, 8, 16  -- beside whether the charge is in requests
local PRESENT, IN_REQUESTS = 1, 2  -- added together: there is such a bucket, and it counts requests now

local now_us, expires_us, bucket_count = struct.unpack('<ddH', ARGV[1])
local read_count = #KEYS
-- #include lib/begin.lua

--[[ The plain case: first settles and new progress, on buckets that have a record and no trailer. It computes the same as the
general case, in the same order, with a single function, because each function that is defined costs time in every call. It
returns nil if it finds anything else in the call. Nothing has been written by then, and the general case starts from the
beginning. ]]
local function settle_plain()
  local huge, min, operations, at = math.huge, math.min, ARGV[4], 1
  local answers, answered, size = { pack_struct('<Bd', DONE, now_us) }, 1, #operations
  local records, marks, lives_ms, absent = {}, {}, {}, {}
  local numbers, charges, accounted, uncollected = {}, {}, {}, {}
  while at <= size do
    local tombstone, final, count, work, requests, latency_ms, expected_ms, acquired_us, deadline_us, late_us
    tombstone, final, count, work, requests, latency_ms, expected_ms, acquired_us, deadline_us, late_us, at =
      unpack_struct('<HBBddddddd', operations, at)
    local state, work_before, late, _ = 0, 0
    local expires_us, mark, mark_at = deadline_us, raws[BEFORE + bucket_count + tombstone], nil
    if marks[tombstone] then return nil end
    if not mark then
      absent[#absent + 1] = KEYS[BEFORE + bucket_count + tombstone]
    else
      if #mark ~= 18 + 16 * count then return nil end
      state, _, work_before, expires_us, mark_at = unpack_struct('<BBdd', mark)
      if state ~= OPEN or not (expires_us > 0 and expires_us < RATE_MAX) then return nil end
    end
    final = final % IN_CLASS
    if now_us > expires_us + late_us or (state == OPEN and final == 0 and work <= work_before) then return nil end
    local expired_us, stop = expires_us, 0
    late = now_us > expires_us and 1 or 0

    for i = 1, count do
      local number, bits, charge, weight, expects_ms, unpaid
      number, bits, charge, weight, at = unpack_struct('<HBdd', operations, at)
      expects_ms, unpaid = expected_ms, 0
      if bits >= EXPECTS then
        if bits % 4 >= EXPECTS then expects_ms, at = unpack_struct('<d', operations, at) end
        if bits >= KEYED then return nil end
        if bits >= UNPAID then unpaid, at = unpack_struct('<d', operations, at) end
        bits = bits % EXPECTS
      end
      local owed, lost
      if mark then
        owed, lost, mark_at = unpack_struct('<dd', mark, mark_at)
      else
        owed, lost = charge + unpaid, unpaid
      end

      local record = records[number]
      if not record then
        local raw = raws[BEFORE + number]
        if not raw or #raw ~= SIZE then return nil end
        record = { unpack_struct('<BHddddddiIdc24ddddddddddd', raw) }
        local flags, updated, balance = record[FLAGS], record[UPDATED], record[BALANCE]
        local capacity, rate = record[CAPACITY], record[RATE]
        if record[VERSION] ~= LAYOUT or flags >= HAS_HISTOGRAM or not (balance > -huge and balance <= capacity
          and capacity > 0 and capacity < huge and rate > 0 and rate < huge and updated > 0) then return nil end
        local elapsed_us = now_us - updated
        if elapsed_us > 0 then
          if flags % 2 ~= QUOTA then
            balance = balance + elapsed_us * rate / 1e6
            if balance > capacity then balance = capacity end
            record[BALANCE] = balance
          end
          record[UPDATED] = now_us
        elseif elapsed_us < -STEP_BACK_MAX_US then
          record[UPDATED] = now_us
        end
        records[number] = record
      end

      local flags, target, worth_each = record[FLAGS], work * weight, 1
      if flags >= COUNTS_REQUESTS ~= (bits == 1) then  -- see worth
        worth_each = nil
        if flags == COUNTS_REQUESTS then
          local tokens = record[RATE] / record[COMMITTED]
          worth_each = tokens > 0 and tokens < huge and tokens or nil
        end
      end
      record[WORK_SETTLED] = record[WORK_SETTLED] + (work - work_before) * weight
      local corrects, refundable = worth_each ~= nil, false
      if final == 0 then
        corrects = corrects and bits == 0 and target > owed
      else
        local settles = flags == COUNTS_REQUESTS and requests * weight or requests
        record[SETTLES] = record[SETTLES] + settles
        if requests >= 1 and settles > 0 then record[WORK_SQUARED] = record[WORK_SQUARED] + target * target / settles end
        if latency_ms > expects_ms then record[MISSED] = record[MISSED] + 1 end
        if bits == 1 then target = settles end
        if corrects then
          local threshold, delta = record[THRESHOLD], target - owed
          if threshold < 0 then threshold = -threshold * charge end
          corrects = not ((delta < 0 and -delta or delta) <= threshold)
          refundable = late == 0 and (flags % 2 ~= QUOTA or acquired_us >= record[WINDOW_START])
        end
      end
      if corrects then  -- see correct
        local delta = target - owed
        if delta > 0 then
          local wanted, room = delta * worth_each, record[BALANCE] + record[DEBT_MAX]
          if not (room > 0) then room = 0 end
          local taken = wanted > room and room or wanted
          record[BALANCE] = record[BALANCE] - taken
          local more = (wanted - taken) / worth_each
          lost = lost + more
          record[UNCOLLECTED] = record[UNCOLLECTED] + more
          owed = target
        elseif delta < 0 then
          local forgiven = min(-delta, lost)
          lost = lost - forgiven
          record[UNCOLLECTED] = record[UNCOLLECTED] - forgiven
          if refundable then
            record[BALANCE] = min(record[BALANCE] + (-delta - forgiven) * worth_each, record[CAPACITY])
            owed = target
          else
            owed = owed - forgiven
          end
        end
      end
      numbers[i], charges[i], accounted[i], uncollected[i] = record, charge, owed, lost
    end

    state = final == 1 and FINAL or OPEN
    if final == 0 then
      local renewed_us = now_us + (deadline_us - acquired_us)
      if renewed_us > expires_us then expires_us = renewed_us end
    end
    local first = numbers[1]
    mark = pack_struct('<BBdddd', state, late, work, expires_us, accounted[1], uncollected[1])
    for i = 1, count do
      local record = numbers[i]
      if record[BALANCE] < -record[STOP_DEBT] then stop = 1 end
      if i > 1 then mark = mark .. pack_struct('<dd', accounted[i], uncollected[i]) end
    end
    marks[tombstone] = mark
    local life_ms = (expires_us + late_us - now_us) / 1000
    lives_ms[tombstone] = math.ceil(min(life_ms, TTL_MAX_S * 1000)) + 1
    answered = answered + 1
    answers[answered] = pack_struct('<BBBdddBddddd', OP_SETTLED, late, stop, work, expires_us, expired_us,
      first[FLAGS] >= COUNTS_REQUESTS and PRESENT + IN_REQUESTS or PRESENT, first[BALANCE], accounted[1] - charges[1],
      uncollected[1], first[RATE], first[CAPACITY])
    for i = 2, count do
      local record = numbers[i]
      answered = answered + 1
      answers[answered] = pack_struct('<Bddddd', record[FLAGS] >= COUNTS_REQUESTS and PRESENT + IN_REQUESTS or PRESENT,
        record[BALANCE], accounted[i] - charges[i], uncollected[i], record[RATE], record[CAPACITY])
    end
  end

  -- MGET returns the same for a key of another type as for a missing one.
  if absent[1] and call('EXISTS', unpack(absent)) ~= 0 then return nil end

  local epoch, now_s, listed = (tonumber(raws[2] or 0) or 0) % EPOCHS, now_us / 1e6, nil
  for number = 1, bucket_count do
    local record, key = records[number], KEYS[BEFORE + number]
    if record[EPOCH] ~= epoch then
      record[EPOCH], listed = epoch, listed or {}
      listed[#listed + 1] = key
    end
    local kept_s, needed_s = record[KEPT_UNTIL]  -- see needed_until_s
    if record[FLAGS] % 2 == QUOTA then
      needed_s = (record[WINDOW_END] - now_us) / 1e6
    else
      needed_s = (record[CAPACITY] - record[BALANCE]) / record[RATE]
    end
    if not (needed_s < TTL_MAX_S) then
      needed_s = now_s + TTL_MAX_S
    else
      needed_s = now_s + ((needed_s > 0 and needed_s or 0) + IDLE_TTL_S)
    end
    if kept_s >= needed_s and kept_s <= needed_s + 2 * KEPT_LONGER_S then
      call('SETRANGE', key, '3', pack_struct('<ddddddiIdc24ddddd', unpack(record, UPDATED, UNCOLLECTED)))
    else
      kept_s = math.ceil(needed_s) + KEPT_LONGER_S
      record[KEPT_UNTIL] = kept_s < KEPT_MAX_S and kept_s or KEPT_MAX_S
      local packed = pack_struct('<BHddddddiIdc24ddddddddddd', unpack(record, VERSION, STOP_DEBT))
      if is_sent then
        call('SET', key, packed, 'PX', math.ceil(kept_s * 1000 - now_us / 1000))
      else
        call('SET', key, packed, 'PXAT', kept_s .. '000')
      end
    end
  end
  for tombstone = 1, #marks do
    call('SET', KEYS[BEFORE + bucket_count + tombstone], marks[tombstone], 'PX', lives_ms[tombstone])
  end
  if listed then
    local length = redis.pcall('RPUSH', KEYS[3], unpack(listed))
    if type(length) == 'number' then
      if length > TOUCHED_MAX then call('LTRIM', KEYS[3], -TOUCHED_MAX, -1) end
      call('EXPIRE', KEYS[3], IDLE_TTL_S)
    end
  end
  local reply = table.concat(answers)
  call('SET', KEYS[1], reply, 'PX', REPLY_TTL_MS)
  return reply
end

-- If the first bucket has a trailer, the call is not plain.
if not is_general and not (raws[BEFORE + 1] and #raws[BEFORE + 1] ~= SIZE) then
  local reply = settle_plain()
  if reply then return reply end
end

-- #include lib/record.lua
-- #include lib/call.lua

local params = unpack_params(ARGV[2])
local records = unpack_records(raws, BEFORE, bucket_count)
local corrupt, touched, terms = {}, {}, {}
for i = 1, bucket_count do
  local term, record = params[unpack_struct('<H', ARGV[3], 2 * i - 1)], records[i]
  terms[i] = term
  if record == nil then
    corrupt[i] = true
  elseif record then
    refill(record, now_us)
  elseif term and in_window(term, now_us) then
    records[i] = fresh_record(term, now_us)  -- its record expired while it was idle, so it was full
  end
end

-- The current operation, with a slot per bucket, and its tombstone. The tables are reused, because new ones are expensive.
local final, class, is_uncounted, work, requests, latency_ms, expected_ms, acquired_us, deadline_us, late_us
local index, in_requests, charge, weight, expects, unpaid = {}, {}, {}, {}, {}, {}
local learn_id, measure = {}, {}  -- per bucket: W15, id of the values of learn_by; W19, see `measured`; 0 without any
local state, late, work_before
local expires_us, expired_us  -- the deadline, which progress may have renewed; the deadline before this operation
local slacks = {}  -- per bucket: the least of expected - actual in this call, ms
local accounted, uncollected = {}, {}  -- per bucket: its debit so far, and the part of it that could not be collected

local function read_rows(operations, at, count)
  local sound = true
  for i = 1, count do
    local bits
    index[i], bits, charge[i], weight[i], at = unpack_struct('<HBdd', operations, at)
    expects[i], unpaid[i], learn_id[i], measure[i] = expected_ms, 0, 0, 0
    if bits >= EXPECTS then
      if has(bits, EXPECTS) then expects[i], at = unpack_struct('<d', operations, at) end
      if has(bits, UNPAID) then unpaid[i], at = unpack_struct('<d', operations, at) end
      if has(bits, KEYED) then learn_id[i], at = unpack_struct('<I', operations, at) end
      if bits >= MEASURED then measure[i], at = unpack_struct('<d', operations, at) end
      bits = bits % EXPECTS
    end
    in_requests[i] = bits
    if corrupt[index[i]] then sound = false end
  end
  return at, sound
end

local tombstones, tombstone_ttls_ms = {}, {}  -- to be written

-- Read the tombstone: state, late, work so far, deadline, then accounted and uncollected of each bucket. False if damaged.
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
  if (state == OPEN or state == FINAL) and expires_us > 0 and expires_us < RATE_MAX then return true end
  expires_us = deadline_us
  return false
end

local function keep_tombstone(key, count)
  local raw = pack_struct('<BBdddd', state, late, work_before, expires_us, accounted[1], uncollected[1])
  for i = 2, count do raw = raw .. pack_struct('<dd', accounted[i], uncollected[i]) end
  tombstones[key] = raw
  local ttl_ms = (expires_us + late_us - now_us) / 1000
  tombstone_ttls_ms[key] = math.ceil(math.min(ttl_ms, TTL_MAX_S * 1000)) + 1
end

-- W6, W19. The threshold is in units, or (negative) a share of the charge; refunds may have one of their own.
local function within_threshold(record, delta, charged, term)
  local threshold = delta < 0 and term and term.refund_threshold or record[THRESHOLD]
  if threshold < 0 then threshold = -threshold * charged end
  return math.abs(delta) <= threshold
end

-- R10: the worth of one unit of the charge in the bucket's current unit; nil: none. Work charged before the bucket began to
-- count requests is worth the same time as then. A request token was the whole price, so a settle corrects nothing.
local function worth(record, i)
  local counts_requests = has(record[FLAGS], COUNTS_REQUESTS)
  if counts_requests == (in_requests[i] == 1) then return 1 end
  if not counts_requests or has(record[FLAGS], QUOTA) then return nil end
  local tokens = record[RATE] / record[COMMITTED]
  return tokens > 0 and tokens < math.huge and tokens or nil
end

-- W5, F-R9: bring the debit of one bucket to the target; the part beyond the debt bound is counted as uncollected.
local function correct(record, i, target, worth_each, refundable)
  local delta = target - accounted[i]
  if delta > 0 then
    local owed = delta * worth_each
    local taken = collectable(record, owed)
    record[BALANCE] = record[BALANCE] - taken
    local lost = (owed - taken) / worth_each
    uncollected[i] = uncollected[i] + lost
    record[UNCOLLECTED] = record[UNCOLLECTED] + lost
    accounted[i] = target
  elseif delta < 0 then
    -- Work that was not done reduces what is uncollected, however late the settle comes.
    local forgiven = math.min(-delta, uncollected[i])
    uncollected[i] = uncollected[i] - forgiven
    record[UNCOLLECTED] = record[UNCOLLECTED] - forgiven
    if refundable then
      record[BALANCE] = math.min(record[BALANCE] + (-delta - forgiven) * worth_each, free_capacity(record))
      accounted[i] = target
    else
      accounted[i] = accounted[i] - forgiven
    end
  end
end

-- Seven steps per octave, from exponent and mantissa. Without a logarithm, script and model agree bit for bit.
local function count_latency(record, took_ms)
  local step = 0
  local mantissa, exponent = math.frexp(took_ms)
  if took_ms > 0 and exponent >= OCTAVE_MIN then
    if mantissa >= 0.7429971445684742 then
      step = mantissa >= 0.9057236642639066 and 6 or mantissa >= 0.820335356007638 and 5 or 4
    elseif mantissa >= 0.6095068271022377 then
      step = mantissa >= 0.6729500963161781 and 3 or 2
    elseif mantissa >= 0.5520447568369061 then
      step = 1
    end
    step = (exponent - OCTAVE_MIN) * STEPS + step
    if step >= OCTAVES * STEPS then step = OCTAVES * STEPS - 1 end
  end
  local counts, at = record[HISTOGRAM], step * 4 + 1
  if record[SHEDDING] then at = at + class * HISTOGRAM_SIZE end
  local counted = unpack_struct('<I', counts, at)
  if counted == COUNT_MAX then return end
  record[HISTOGRAM] = string.sub(counts, 1, at - 1) .. pack_struct('<I', counted + 1) .. string.sub(counts, at + 4)
end

local MEDIAN_STEP = 1.05

-- Q2, Q5, Q8: how a class fares against its target and what it expects. An expectation of -inf: it failed, however fast.
local function count_class(shedding, i, took_ms)
  local term, expected_ms = terms[index[i]], expects[i]
  local target_ms, failed = 0, expected_ms == -math.huge
  if term and term.overload then target_ms = unpack_struct('<d', ARGV[2], term.overload_at + 8 * class) end
  shedding[TIMED + class] = shedding[TIMED + class] + 1
  shedding[SECONDS] = shedding[SECONDS] + took_ms / 1000
  if failed or (target_ms > 0 and took_ms > target_ms) then shedding[LATE + class] = shedding[LATE + class] + 1 end
  if failed then shedding[FAILED] = shedding[FAILED] + 1 end
  local slack, least = expected_ms - took_ms, slacks[index[i]] or math.huge
  if slack < least and not failed then slacks[index[i]] = slack end
  if not failed then  -- Q13: a step towards the median
    local median_ms = shedding[MEDIAN_MS]
    if not (median_ms > 0) then
      shedding[MEDIAN_MS] = took_ms
    elseif took_ms > median_ms then
      shedding[MEDIAN_MS] = median_ms * MEDIAN_STEP
    elseif took_ms < median_ms then
      shedding[MEDIAN_MS] = median_ms / MEDIAN_STEP
    end
  end
end

-- W16: the number of requests that this one counts as.
local function counted(record, i)
  return weighs(record[FLAGS]) and requests * weight[i] or requests
end

-- W15: the entry of the request's values of learn_by, made if there is none; nil where it has none.
local function entry_of(record, i)
  if learn_id[i] == 0 or not has(record[FLAGS], LEARNS) then return nil end
  return entry_for(record[LEARNED_BY], learn_id[i])
end

-- Statistics of final settles, each counted once.
local function count(record, target, i)
  local settles = counted(record, i)
  record[SETTLES] = record[SETTLES] + settles
  -- A settle of less than one request could make the square arbitrarily large.
  if requests >= 1 and settles > 0 then record[WORK_SQUARED] = record[WORK_SQUARED] + target * target / settles end
  local took_ms, shedding = latency_ms, record[SHEDDING]
  if shedding and not (took_ms >= 0) then  -- no latency was reported: the time since the acquire counts (Q8)
    took_ms = (now_us - acquired_us) / 1000
    if not (took_ms > 0) then took_ms = 0 end
  end
  if took_ms > expects[i] then record[MISSED] = record[MISSED] + 1 end
  if record[HISTOGRAM] ~= '' and took_ms >= 0 then count_latency(record, took_ms) end
  if shedding then count_class(shedding, i, took_ms) end
end

-- W19: units of work, given in the caller's own measure: so much of it is a unit, rounded up; below zero: not rounded.
local function measured(amount, unit)
  if unit == 0 then return amount end
  return unit > 0 and math.ceil(amount / unit) or amount / -unit
end

local function settle_bucket(record, i)
  local units = measured(work, measure[i])
  local target, worth_each = units * weight[i], worth(record, i)
  local more, entry = (units - measured(work_before, measure[i])) * weight[i], entry_of(record, i)
  record[WORK_SETTLED] = record[WORK_SETTLED] + more
  if entry then entry[4] = entry[4] + more end
  if final == 0 then
    if worth_each and in_requests[i] == 0 and target > accounted[i] then
      correct(record, i, target, worth_each, false)
    end
    return
  end
  count(record, target, i)
  if entry then
    local settles = counted(record, i)
    entry[3] = entry[3] + settles
    if requests >= 1 and settles > 0 then entry[5] = entry[5] + target * target / settles end
  end
  if not worth_each then return end
  if in_requests[i] == 1 then target = counted(record, i) end
  if within_threshold(record, target - accounted[i], charge[i], terms[index[i]]) then return end
  -- A quota refunds nothing that was charged in an earlier window.
  local same_window = not has(record[FLAGS], QUOTA) or acquired_us >= record[WINDOW_START]
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
  state, work_before = final == 1 and FINAL or OPEN, work
end

-- W18: a settle frees its place, unless its slot of time has already been dropped. Progress moves the place into the present
-- slot. If the place's own slot counts too few, the other slot is reduced: a clock that went back may have put it there.
local function move_places(buckets, renewed)
  local ttl_us = deadline_us - acquired_us
  local counted_us = expired_us - ttl_us
  for i = 1, buckets do
    local record, term = records[index[i]], terms[index[i]]
    if record and record[FLAGS] % 256 >= IN_FLIGHT then
      local is_known = term and term.places
      local amount = is_known and term.in_work and charge[i] or requests
      if counted_us >= record[SLOT_BEFORE] and (is_known or not renewed) then
        local own, other = FLYING, FLYING_BEFORE
        if counted_us < record[SLOT_START] then own, other = FLYING_BEFORE, FLYING end
        local left = record[own] - amount
        record[own] = left > 0 and left or 0
        if left < 0 then
          left = record[other] + left
          record[other] = left > 0 and left or 0
        end
      end
      if renewed and is_known then
        take_place(record, term, amount, ttl_us)
        touched[index[i]] = true
      end
    end
  end
end

-- F-R2, F-R3, F-R12: a settled reservation stays settled; of progress calls the highest work counts.
local function standing()
  if state == FINAL then return (final == 1 and work ~= work_before) and OP_CONFLICT or OP_DUPLICATE end
  if state == OPEN and final == 0 and work <= work_before then return OP_DUPLICATE end
  return OP_SETTLED
end

local function answer(status, buckets)
  local stop, rows = 0, {}
  for i = 1, buckets do
    local record, adjusted = records[index[i]], accounted[i] - charge[i]
    if record then
      if record[BALANCE] < -record[STOP_DEBT] then stop = 1 end
      local present = has(record[FLAGS], COUNTS_REQUESTS) and PRESENT + IN_REQUESTS or PRESENT
      rows[i] = pack_struct('<Bddddd', present, record[BALANCE], adjusted, uncollected[i], record[RATE], record[CAPACITY])
    else
      rows[i] = pack_struct('<Bddddd', 0, 0, adjusted, uncollected[i], 0, 0)
    end
  end
  return pack_struct('<BBBddd', status, late, stop, work_before, expires_us, expired_us) .. table.concat(rows)
end

local function settle(tombstone, buckets, sound)
  local readable = read_tombstone(tombstone, buckets)
  if now_us > expires_us + late_us then return string.char(OP_GONE) end
  if not (sound and readable) then return string.char(OP_CORRUPT) end
  expired_us = expires_us
  local status = standing()
  if status == OP_SETTLED then move(buckets) end
  if state == OPEN then
    -- W14: progress moves the deadline to a whole time to live from now.
    local renewed_us = now_us + (deadline_us - acquired_us)
    if renewed_us > expires_us then expires_us = renewed_us end
  end
  if not is_uncounted and (expires_us > expired_us or (state == FINAL and status == OP_SETTLED)) then
    move_places(buckets, state ~= FINAL)
  end
  if status == OP_SETTLED or state == OPEN then keep_tombstone(tombstone, buckets) end
  return answer(status, buckets)
end

local operations, at, answers = ARGV[4], 1, { begin_reply(now_us) }
local size = #operations
while at <= size do
  local tombstone, buckets, sound
  tombstone, final, buckets, work, requests, latency_ms, expected_ms, acquired_us, deadline_us, late_us, at =
    unpack_struct('<HBBddddddd', operations, at)
  class, is_uncounted = 0, final >= UNCOUNTED
  if final >= IN_CLASS then
    class = math.floor(final % UNCOUNTED / IN_CLASS)
    final = final % IN_CLASS
  end
  at, sound = read_rows(operations, at, buckets)
  answers[#answers + 1] = settle(KEYS[BEFORE + bucket_count + tombstone], buckets, sound)
end

write_records(raws, records, touched, now_us, is_sent, slacks)
for key, raw in pairs(tombstones) do call('SET', key, raw, 'PX', tombstone_ttls_ms[key]) end
return finish(KEYS[1], answers)
