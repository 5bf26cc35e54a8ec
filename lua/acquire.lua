#!lua
--[[ acquire: admit or refuse a batch of requests, each over all its buckets or none (P5).
KEYS[1]   reply         string, this call's reply, kept so that a repeat debits nothing
KEYS[2]   sampling      string, number of the sampling epoch, moved by the controller
KEYS[3]   touched       list of the buckets changed since the last sampling
KEYS[4..] buckets       string records, see lib/record.lua; after them the idempotency keys that operations name
ARGV[1]   head          now_us (0 = server clock; only tests send one, below 0 to have the general form decide),
                        expires_us (0 = never), number of buckets
ARGV[2]   params        rows of policy parameters, see lib/record.lua
ARGV[3]   terms         for each bucket the number of its row in params
ARGV[4]   operations    flags, buckets, requests; a row per bucket; where a bucket has overload control the request's
                        class, a draw in [0, 1) and how soon it expects its answer (ms); an idempotency key's number,
                        fingerprint and memo; the weight of a request in each bucket that counts requests, if it is
                        WEIGHED; its time to live (us), if it LIVES; the id of the
                        values of learn_by, for each bucket that is asked KEYED. An operation that is TOLD asks nothing: a node has
                        refused so many requests by itself
RETURNS   one string: done or expired, now_us, then for each operation its status and a row per bucket: verdict and
          unit, balance, charge (of a key that is blocked: for how long, us; of a bucket that is full: how many may be
          open), rate, capacity; of an operation with a draw (status + SHEDS) also state, quality, and the class's share
          refused, rate and limit; limiter/store/call_layout.py reads it
HOLDS     a repeated call changes nothing; a refusal spends nothing; balance <= capacity; a debit stops at -debt_max and
          counts the rest; each bucket is read once and written once; bytes of an unknown form are not changed ]]

local BEFORE = 3  -- keys before those of the buckets
local OP_REFUSED, OP_GRANTED, OP_CORRUPT, OP_WINDOW, OP_CONFLICT, OP_REPLAYED, OP_COUNTED = 0, 1, 2, 3, 4, 5, 6
local SHEDS = 16  -- added to the status of an operation that was subject to overload control
local PASSED, DEBITED, BLOCKED, TURNED_AWAY, DENIED, FULL = 0, 1, 2, 3, 8, 9
local IN_REQUESTS = 4  -- added to a verdict: this bucket counts requests now
local TOLD, DRY_RUN, DRAWN, IDEMPOTENT, WEIGHED, LIVES, SECOND, FURTHER = 1, 2, 4, 8, 16, 32, 64, 128
local LEARNED, TOO_LARGE, COVERED, REFUSING, KEYED = 1, 2, 4, 8, 16  -- how a bucket is asked; REFUSING: it refused

local now_us, expires_us, bucket_count = struct.unpack('<ddH', ARGV[1])
local read_count = BEFORE + bucket_count
-- #include lib/begin.lua

-- Fields of a bucket in the plain case: its terms, then the front of its record.
local P_RATE, P_CAPACITY, P_DEBT_MAX, P_PART, P_TERM = 1, 2, 3, 4, 5
local P_VERSION, P_FLAGS, P_UPDATED, P_BALANCE, P_REQUESTS, P_ADMITTED, P_REFUSED = 6, 7, 8, 9, 10, 11, 12
local P_CHARGED, P_EPOCH, P_KEPT, P_CHARGE = 13, 14, 15, 16
local P_SECOND, P_FURTHER = 18, 19  -- attempts that this call counts, nil: none; 17 is where unpacking ended
-- Fields of its policy: the row of params, the values that a new bucket begins with, and the bytes of its terms.
local T_FLAGS, T_SHADOW, T_COMMITTED, T_DEBT_MAX, T_STOP_DEBT, T_THRESHOLD, T_BURST, T_BURST_S = 1, 2, 3, 4, 5, 6, 7, 8
local T_FIRST_RATE, T_FIRST_CAPACITY, T_FIRST_DEBT_MAX, T_STANDING = 9, 10, 11, 12
local BEHIND_KEPT = 59  -- bytes of a record as far as KEPT_UNTIL
local BEHIND_FLYING = 83  -- as far as the attempts

--[[ The plain case: operations without any extra, on buckets that have no trailer and the terms of their policy, or that have no
record yet. It computes the same as the general case, in the same order, with locals and a single function, because each
function that is defined costs time in every call. It returns nil if it finds anything else in the call. Nothing has been
written by then, and the general case starts from the beginning. ]]
local function decide_plain()
  local rows, byte, sub, huge, params, at = ARGV[2], string.byte, string.sub, math.huge, {}, 1
  while at <= #rows do
    local flags, committed, cap, capacity, burst, burst_s, debt_max, threshold, stop_debt, window_start, window_end, _,
      after = unpack_struct('<Hddddddddddd', rows, at)
    local shadow, rate = flags >= SHADOW, committed
    if shadow then flags = flags - SHADOW end
    if flags >= HAS_HISTOGRAM then return nil end
    local term = { flags, shadow, committed, debt_max, stop_debt, threshold, burst, burst_s }
    if flags % 2 == QUOTA then
      if now_us < window_start or now_us >= window_end then return nil end
      rate, committed = window_end, window_start
    elseif flags == COUNTS_REQUESTS then
      rate, capacity = cap, burst + burst_s * cap
      if capacity < 1 then capacity = 1 end
      debt_max, stop_debt = debt_max * cap / committed, stop_debt * cap / committed
    end
    term[T_FIRST_RATE], term[T_FIRST_CAPACITY], term[T_FIRST_DEBT_MAX] = rate, capacity, debt_max
    term[T_STANDING] = pack_struct('<dddddd', rate, capacity, committed, debt_max, threshold, stop_debt)
    params[#params + 1], at = term, after
  end

  local records, numbers, only = {}, ARGV[3], #params == 1 and params[1]
  local buckets, wants, charges, passes = {}, {}, {}, {}
  local operations, answers, answered = ARGV[4], { pack_struct('<Bd', DONE, now_us) }, 1
  local size = #operations
  at = 1
  while at <= size do
    local flags, count, requests, number, asked, need, charge
    flags, count, requests, number, asked, need, charge, at = unpack_struct('<BBdHBdd', operations, at)
    local attempt = 0
    if flags > TOLD then
      if flags ~= SECOND and flags ~= FURTHER then return nil end
      attempt, flags = flags, 0
    end
    local granted, i = true, 1
    while true do
      local record = records[number]
      if not record then
        local term = only
        if not term then
          local low, high = byte(numbers, 2 * number - 1, 2 * number)
          term = params[low + 256 * high]
        end
        local rate, capacity, debt_max = term[T_FIRST_RATE], term[T_FIRST_CAPACITY], term[T_FIRST_DEBT_MAX]
        local raw, part = raws[BEFORE + number], 1
        if raw then
          if #raw ~= SIZE then return nil end
          if sub(raw, CHANGING + 1) ~= term[T_STANDING] then
            -- The controller may have set another cap than the policy's; burst and debt bound follow from it.
            if term[T_FLAGS] ~= COUNTS_REQUESTS then return nil end
            local committed, threshold, stop_debt
            rate, capacity, committed, debt_max, threshold, stop_debt = unpack_struct('<dddddd', raw, CHANGING + 1)
            local most = term[T_BURST] + term[T_BURST_S] * rate
            if not (rate > 0 and rate < huge and committed == term[T_COMMITTED] and capacity == (most > 1 and most or 1)
              and debt_max == term[T_DEBT_MAX] * rate / committed and stop_debt == term[T_STOP_DEBT] * rate / committed
              and threshold == term[T_THRESHOLD]) then return nil end
            part = capacity / term[T_FIRST_CAPACITY]
          end
          record = { rate, capacity, debt_max, part, term, unpack_struct('<BHddddddiId', raw) }
          local updated, balance = record[P_UPDATED], record[P_BALANCE]
          if record[P_VERSION] ~= LAYOUT or record[P_FLAGS] ~= term[T_FLAGS]
            or not (balance > -huge and balance <= capacity and updated > 0) then return nil end
          local elapsed_us = now_us - updated
          if elapsed_us > 0 then
            if term[T_FLAGS] % 2 ~= QUOTA then
              balance = balance + elapsed_us * rate / 1e6
              if balance > capacity then balance = capacity end
              record[P_BALANCE] = balance
            end
            record[P_UPDATED] = now_us
          elseif elapsed_us < -STEP_BACK_MAX_US then
            record[P_UPDATED] = now_us
          end
        else
          if call('EXISTS', KEYS[BEFORE + number]) ~= 0 then return nil end
          record = { rate, capacity, debt_max, part, term, LAYOUT, term[T_FLAGS], now_us, capacity, 0, 0, 0, 0, -1, 0, 0 }
        end
        records[number] = record
      end
      if flags == TOLD then
        record[P_REQUESTS] = record[P_REQUESTS] + requests
        if asked == REFUSING then record[P_REFUSED] = record[P_REFUSED] + requests end
      else
        local balance, capacity, part = record[P_BALANCE], record[P_CAPACITY], record[P_PART]
        local kind, want = record[P_FLAGS], charge
        if part ~= 1 then  -- see part_of
          local whole = need
          need = whole * part
          if whole > 0 then
            local least = whole < 1 and whole or 1
            if part > 1 and whole <= 1 then
              need = whole
            else
              if least > capacity then least = capacity end
              if not (need > least) then need = least end
            end
          end
        end
        if kind >= COUNTS_REQUESTS then
          want = requests
          if asked >= COVERED then asked = asked - COVERED end
        elseif asked ~= 0 and asked % 2 == LEARNED and record[P_CHARGE] > 0 then
          want = record[P_CHARGE]
          local most = capacity + record[P_DEBT_MAX]
          if want > most and kind ~= QUOTA then want = most end
          charge = want
        end
        local cover = want
        if kind % 2 ~= QUOTA then
          if asked < COVERED then cover = want - record[P_DEBT_MAX] end
          if cover > capacity and (asked < COVERED or asked % 2 == LEARNED) then cover = capacity end
        end
        local passed = balance >= need and balance >= cover and (asked < TOO_LARGE or asked % 4 < TOO_LARGE)
        if not (passed or record[P_TERM][T_SHADOW]) then granted = false end
        buckets[i], wants[i], charges[i], passes[i] = record, want, charge, passed
      end
      if i == count then break end
      i = i + 1
      number, asked, need, charge, at = unpack_struct('<HBdd', operations, at)
    end

    answered = answered + 1
    if flags == TOLD then
      answers[answered] = string.char(OP_COUNTED)
    else
      local status = granted and OP_GRANTED or OP_REFUSED
      for i = 1, count do
        local record, verdict, charge = buckets[i], PASSED, charges[i]
        local balance, kind = record[P_BALANCE], record[P_FLAGS]
        record[P_REQUESTS] = record[P_REQUESTS] + requests
        if attempt ~= 0 then
          record[P_SECOND] = (record[P_SECOND] or 0) + (attempt == SECOND and 1 or 0)
          record[P_FURTHER] = (record[P_FURTHER] or 0) + (attempt == FURTHER and 1 or 0)
        end
        if not passes[i] then
          verdict = BLOCKED
          record[P_REFUSED] = record[P_REFUSED] + requests
        elseif granted then
          local want, room = wants[i], balance + record[P_DEBT_MAX]
          if want > room then return nil end  -- the general case counts what cannot be collected
          verdict, balance = DEBITED, balance - want
          record[P_BALANCE], record[P_ADMITTED] = balance, record[P_ADMITTED] + requests
          if kind >= COUNTS_REQUESTS then
            record[P_CHARGED], charge = record[P_CHARGED] + charge, want
          else
            record[P_CHARGED] = record[P_CHARGED] + want
          end
        end
        if kind >= COUNTS_REQUESTS then verdict = verdict + IN_REQUESTS end
        if i == 1 then
          answers[answered] = pack_struct('<BBdddd', status, verdict, balance, charge, record[P_RATE], record[P_CAPACITY])
        else
          answered = answered + 1
          answers[answered] = pack_struct('<Bdddd', verdict, balance, charge, record[P_RATE], record[P_CAPACITY])
        end
      end
    end
  end

  local epoch, now_s, listed = (tonumber(raws[2] or 0) or 0) % EPOCHS, now_us / 1e6, nil
  for number = 1, bucket_count do
    local record, key, raw = records[number], KEYS[BEFORE + number], raws[BEFORE + number]
    local kind, balance, capacity, kept_s = record[P_FLAGS], record[P_BALANCE], record[P_CAPACITY], record[P_KEPT]
    if record[P_EPOCH] ~= epoch then
      record[P_EPOCH], listed = epoch, listed or {}
      listed[#listed + 1] = key
    end
    local left_s  -- see needed_until_s
    if kind % 2 == QUOTA then
      left_s = (record[P_RATE] - now_us) / 1e6
    else
      left_s = (capacity - balance) / record[P_RATE]
    end
    if not (left_s < TTL_MAX_S) then
      left_s = now_s + TTL_MAX_S
    else
      left_s = now_s + ((left_s > 0 and left_s or 0) + IDLE_TTL_S)
    end
    local attempts
    if record[P_SECOND] then
      local second, further = 0, 0
      if raw then second, further = unpack_struct('<II', raw, BEHIND_FLYING + 1) end
      second, further = second + record[P_SECOND], further + record[P_FURTHER]
      attempts = pack_struct('<II', second < ATTEMPTS_MAX and second or ATTEMPTS_MAX,
        further < ATTEMPTS_MAX and further or ATTEMPTS_MAX)
    end
    if raw and kept_s >= left_s and kept_s <= left_s + 2 * KEPT_LONGER_S then
      if attempts then call('SETRANGE', key, '83', attempts) end
      call('SETRANGE', key, '3', pack_struct('<ddddddi', record[P_UPDATED], balance, record[P_REQUESTS],
        record[P_ADMITTED], record[P_REFUSED], record[P_CHARGED], record[P_EPOCH]))
    else
      kept_s = math.ceil(left_s) + KEPT_LONGER_S
      local rest
      if raw then
        rest = sub(raw, BEHIND_KEPT + 1)
      else
        rest = string.rep('\0', CHANGING - BEHIND_KEPT) .. record[P_TERM][T_STANDING]
      end
      if attempts then  -- 8 bytes
        rest = sub(rest, 1, BEHIND_FLYING - BEHIND_KEPT) .. attempts .. sub(rest, BEHIND_FLYING - BEHIND_KEPT + 9)
      end
      local packed = pack_struct('<BHddddddiI', LAYOUT, kind, record[P_UPDATED], balance, record[P_REQUESTS],
        record[P_ADMITTED], record[P_REFUSED], record[P_CHARGED], record[P_EPOCH],
        kept_s < KEPT_MAX_S and kept_s or KEPT_MAX_S) .. rest
      if is_sent then
        call('SET', key, packed, 'PX', math.ceil(kept_s * 1000 - now_us / 1000))
      else
        call('SET', key, packed, 'PXAT', kept_s .. '000')
      end
    end
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

if not is_general then
  local reply = decide_plain()
  if reply then return reply end
end

-- #include lib/record.lua
-- #include lib/call.lua

local IDEMPOTENCY_TTL_MS, KEPT_LAYOUT = 60000, 1
local FINGERPRINT_SIZE, KEPT_SIZE, ANSWER_ROW_SIZE, SHEDS_ROW_SIZE = 16, 29, 33, 66

local params = unpack_params(ARGV[2])
local records = unpack_records(raws, BEFORE, bucket_count)
local terms, unusable, touched = {}, {}, {}
local unit, part = {}, {}  -- per bucket: IN_REQUESTS or 0, and its part of the whole limit's capacity
for i = 1, bucket_count do
  local term, record = params[unpack_struct('<H', ARGV[3], 2 * i - 1)], records[i]
  terms[i] = term
  if record == nil then
    unusable[i] = OP_CORRUPT
  elseif not in_window(term, now_us) then
    unusable[i] = OP_WINDOW
  else
    if record then
      advance(record, term, now_us)
    else
      record = fresh_record(term, now_us)
      records[i] = record
    end
    unit[i] = has(record[FLAGS], COUNTS_REQUESTS) and IN_REQUESTS or 0
    part[i] = free_capacity(record) / term.whole_capacity
  end
end

-- The operation at hand, a slot per bucket: reused, because a table per operation costs more than the decision.
local index, how, minimum, charge, verdict = {}, {}, {}, {}, {}
local full = {}  -- of buckets whose verdict is FULL: the number that may be open
local learn_id = {}  -- W15: of the values of learn_by, per bucket; 0 without any
local weight  -- of a request, per bucket; nil where all weigh 1
local ttl_us, attempt  -- how long its reservation lives; SECOND or FURTHER where it was tried before, else 0

-- W16: the number of requests that the operation counts as in one of its buckets.
local function counted(i, requests)
  if weight and weighs(records[index[i]][FLAGS]) then return requests * weight[i] end
  return requests
end

-- W8, W15: the charge learned from requests like this one, times their weight; 0 while nothing is learned.
local function learned_charge(record, i)
  if not has(record[FLAGS], LEARNS) then return record[CHARGE] end
  local estimate = record[CHARGE]
  if learn_id[i] ~= 0 then
    local entry = find_learned(record[LEARNED_BY], learn_id[i])
    estimate = entry and entry[2] or 0
  end
  return estimate * (weight and weight[i] or 1)
end

-- Minimums are given for the whole capacity. A bucket that holds a part of it, or counts in another unit, asks for the same
-- part of its own capacity. A minimum never scales below one token: with less, a bucket would admit on a fraction of one.
local function part_of(whole, held, capacity)
  local need = whole * held
  if whole <= 0 then return need end
  if held > 1 and whole <= 1 then return whole end
  local least = whole < 1 and whole or 1
  if least > capacity then least = capacity end
  return need > least and need or least
end

-- W17: the time for which a key is still blocked, 0 if it is not. A clock that went back makes no block longer.
local function blocked_us(record, params, now_us)
  local left = record[BLOCKED_UNTIL] - now_us
  if left > params.block_for then left = params.block_for end
  return left > 0 and left or 0
end

-- W17: count a refusal by the policy's own limit, and begin a block if it was one too many.
local function count_refusal(record, params, requests, now_us)
  local left = record[COUNTED_UNTIL] - now_us
  if not (left > 0 and left <= params.block_in) then
    record[COUNTED_UNTIL], record[BLOCK_REFUSED] = now_us + params.block_in, 0
  end
  record[BLOCK_REFUSED] = record[BLOCK_REFUSED] + requests
  if record[BLOCK_REFUSED] >= params.block_after then
    record[COUNTED_UNTIL], record[BLOCK_REFUSED], record[BLOCKED_UNTIL] = 0, 0, now_us + params.block_for
  end
end

-- W3, W13: the balance that a request needs. The charge must stay within the debt bound, because otherwise a minimum below
-- it would limit nothing. A charge that no balance could pay waits for a full bucket. A quota (P4) and a bucket with
-- `admit: covered` must cover the charge; a learned charge above the capacity needs a full bucket.
local function judge(count, requests)
  local granted = true
  for i = 1, count do
    local at = index[i]
    local record, term, need, want, asked = records[at], terms[at], minimum[i], charge[i], how[i]
    local balance = record[BALANCE]
    if part[at] ~= 1 then need = part_of(need, part[at], free_capacity(record)) end
    if unit[at] ~= 0 then
      want = counted(i, requests)
      if asked >= COVERED then asked = asked - COVERED end
    elseif asked ~= 0 and asked % 2 == LEARNED then
      local estimate = learned_charge(record, i)
      if estimate > 0 then
        want = estimate
        local most = record[CAPACITY] + record[DEBT_MAX]
        if want > most and not term.quota then want = most end
        charge[i] = want
      end
    end
    local cover = want
    if not term.quota then
      local capacity = record[CAPACITY]
      if asked < COVERED then cover = want - record[DEBT_MAX] end
      if cover > capacity and (asked < COVERED or asked % 2 == LEARNED) then cover = capacity end
    end
    local passed = balance >= need and balance >= cover and (asked < TOO_LARGE or not has(asked, TOO_LARGE))
    verdict[i] = passed and PASSED or BLOCKED
    if term.block_for then
      local left_us = blocked_us(record, term, now_us)
      if left_us > 0 then passed, verdict[i], charge[i] = false, DENIED, left_us end
    end
    if passed and term.places and term.places > 0 then
      -- W18: a bucket that holds a share of the limit has as many places, and one at least. Places of parts that are lent
      -- are their holders' (B8).
      local places = term.places * (share_of(record, term, now_us)
        * (has(record[FLAGS], LENDS) and 1 - record[PARTS_CAPACITY] or 1))
      if places < 1 then places = 1 end
      if record[FLYING] + record[FLYING_BEFORE] >= places then passed, verdict[i], full[i] = false, FULL, places end
    end
    if not (passed or term.shadow) then granted = false end
  end
  return granted
end

-- Debit every bucket of a granted operation; one in shadow (P11) only if it would have admitted the request.
local function commit(count, requests, granted)
  for i = 1, count do
    local at = index[i]
    local record, number = records[at], counted(i, requests)
    touched[at] = true
    record[REQUESTS] = record[REQUESTS] + number
    if attempt ~= 0 then  -- G6
      local second, further = unpack_struct('<II', record[ROOM], ATTEMPTS)
      if attempt == SECOND then second = second + 1 else further = further + 1 end
      record[ROOM] = string.sub(record[ROOM], 1, ATTEMPTS - 1) .. pack_struct('<II',
        second < ATTEMPTS_MAX and second or ATTEMPTS_MAX, further < ATTEMPTS_MAX and further or ATTEMPTS_MAX)
    end
    if verdict[i] >= BLOCKED then
      if verdict[i] == FULL then
        record[SLOT_REFUSED] = record[SLOT_REFUSED] + requests
      elseif verdict[i] ~= TURNED_AWAY then
        record[REFUSED] = record[REFUSED] + number
      end
      if verdict[i] == BLOCKED and terms[at].block_for then count_refusal(record, terms[at], requests, now_us) end
    elseif granted then
      local wanted = unit[at] ~= 0 and number or charge[i]
      local taken = collectable(record, wanted)
      record[BALANCE] = record[BALANCE] - taken
      if taken < wanted then record[UNCOLLECTED] = record[UNCOLLECTED] + (wanted - taken) end
      record[ADMITTED] = record[ADMITTED] + number
      record[WORK_CHARGED] = record[WORK_CHARGED] + (unit[at] ~= 0 and charge[i] or taken)
      verdict[i], charge[i] = DEBITED, taken
      local term = terms[at]
      if term.places then take_place(record, term, term.in_work and taken or requests, ttl_us) end
    end
  end
end

local function answer(count, status)
  local at = index[1]
  local record = records[at]
  local rows = pack_struct('<BBdddd', status, verdict[1] + unit[at], record[BALANCE], verdict[1] == FULL and full[1] or charge[1], record[RATE],
    record[CAPACITY])
  for i = 2, count do
    at = index[i]
    record = records[at]
    rows = rows .. pack_struct('<Bdddd', verdict[i] + unit[at], record[BALANCE], verdict[i] == FULL and full[i] or charge[i], record[RATE],
      record[CAPACITY])
  end
  return rows
end

-- Of the operation at hand: its class, the chance it was given, and how soon it expects its answer (NaN: nobody says, -inf:
-- the chance is that of a session); only where a bucket has overload control.
local class, draw, expected_ms
local ahead_after = {}  -- per bucket: what AHEAD of the class is once the decision is in force
local AHEAD_MAX, YIELD_LIMIT = 10, 0.9

local function fewer_ahead(ahead, requests)
  local fewer = ahead - AHEAD_MAX * requests
  return fewer > 1 and fewer or 1
end

-- Q4, S3, S9: whether overload control turns the request away, and AHEAD afterwards. Whose customer takes more than it
-- committed to (S11), and who would be late anyway (Q13), yields: it takes refusals of others of its class, see shedding.py.
local function turns_away(record, is_over_committed, requests)
  local shedding = record[SHEDDING]
  local is_lent, ahead = shedding[LENT_UNTIL] ~= 0, shedding[AHEAD + class]
  local is_exchanged = expected_ms ~= -math.huge
  local yields = is_over_committed or (is_lent and is_exchanged and expected_ms < shedding[RESPONSE_MS])
  local free = has(record[FLAGS], LENDS) and 1 - record[PARTS_CAPACITY] or 1  -- the rest is its holders'
  local limit = shedding[SHED_LIMIT + class] * free
  if limit > 0 then
    local in_flight = (record[FLYING] or 0) + (record[FLYING_BEFORE] or 0)
    if in_flight >= limit then return true, yields and ahead or fewer_ahead(ahead, requests) end
    if yields and ahead >= 1 and ahead < 1 + AHEAD_MAX and in_flight >= limit * YIELD_LIMIT then
      return true, ahead + requests
    end
  end
  if not is_lent then return false, ahead end
  local share, rate = shedding[SHED_SHARE + class], shedding[SHED_RATE + class]
  local is_drawn = draw < share
  local is_spared = is_drawn and is_exchanged and not yields and ahead >= 1 + requests
  if is_drawn and not is_spared then return true, (yields or ahead > 1) and ahead or 1 end
  if rate ~= 0 and shedding[SHED_TOKENS + class] < 1 then return true, yields and ahead or fewer_ahead(ahead, requests) end
  if is_spared then return false, ahead - requests end
  if yields and is_exchanged and ahead >= 1 and ahead < 1 + AHEAD_MAX and (share > 0 or rate ~= 0) then
    return true, ahead + requests
  end
  return false, ahead
end

-- Overload control has the last word, so that the share it refuses is that of all requests. A key takes more than it
-- committed to where another bucket has less than half left of what it may hold (S11).
local function shed(count, requests)
  local granted, over = true, 0
  if count > 1 then
    for i = 1, count do
      local record = records[index[i]]
      if record[FLAGS] % 2 ~= QUOTA and not terms[index[i]].shadow and record[BALANCE] < record[CAPACITY] / 2 then
        over = over + 1
      end
    end
  end
  for i = 1, count do
    local at = index[i]
    local record = records[at]
    if record[SHEDDING] and verdict[i] ~= DENIED then
      local others = over
      if over > 0 and record[FLAGS] % 2 ~= QUOTA and not terms[at].shadow and record[BALANCE] < record[CAPACITY] / 2 then
        others = over - 1
      end
      local refused
      refused, ahead_after[i] = turns_away(record, others > 0, requests)
      if refused then verdict[i] = TURNED_AWAY end
    end
    if verdict[i] >= BLOCKED and not terms[at].shadow then granted = false end
  end
  return granted
end

-- Who asked, and who of the latest was turned away (S8); a class that is limited pays for who was let in.
local function commit_classes(count, requests)
  for i = 1, count do
    local shedding = records[index[i]][SHEDDING]
    if shedding and verdict[i] ~= DENIED then
      local asked, recently, told = shedding[ASKED + class] + requests, shedding[SHED_RECENTLY + class], 0
      shedding[ASKED + class] = asked
      -- Nobody was spared where another bucket has refused.
      if verdict[i] == TURNED_AWAY or verdict[i] == DEBITED then shedding[AHEAD + class] = ahead_after[i] end
      if verdict[i] == TURNED_AWAY then
        shedding[SHED + class], told = shedding[SHED + class] + requests, 1
      elseif verdict[i] == DEBITED and shedding[LENT_UNTIL] ~= 0 and shedding[SHED_RATE + class] > 0 then
        local tokens, term = shedding[SHED_TOKENS + class], terms[index[i]]
        if term.places and term.in_work then  -- S11: rates are in work, like what is in flight
          shedding[SHED_TOKENS + class] = tokens - charge[i]
        else
          shedding[SHED_TOKENS + class] = requests < tokens and tokens - requests or 0
        end
      end
      local part = requests / (asked > RECENT and RECENT or asked > RECENT_MIN and asked or RECENT_MIN)
      shedding[SHED_RECENTLY + class] = recently + (told - recently) * (part < 1 and part or 1)
    end
  end
end

local function answer_drawn(count, status)
  local rows = string.char(status + SHEDS)
  for i = 1, count do
    local at = index[i]
    local record, state, quality, refused_share, rate, limit = records[at], 0, 1, 0, 0, 0
    local shedding = record[SHEDDING]
    if shedding then
      limit = shedding[SHED_LIMIT + class]
      if shedding[LENT_UNTIL] ~= 0 then
        state, quality = shedding[STATE], shedding[QUALITY]
        refused_share, rate = shedding[SHED_SHARE + class], shedding[SHED_RATE + class]
      end
      if shedding[SHED_RECENTLY + class] > refused_share then refused_share = shedding[SHED_RECENTLY + class] end
      -- S8: who is refused with many of its class is told so, whatever the controller has seen by now.
      if verdict[i] == TURNED_AWAY and refused_share >= 0.2 then state = OVERLOADED end
    end
    rows = rows .. pack_struct('<BddddBdddd', verdict[i] + unit[at], record[BALANCE], verdict[i] == FULL and full[i] or charge[i], record[RATE],
      record[CAPACITY], state, quality, refused_share, rate, limit)
  end
  return rows
end

local function decide_drawn(flags, count, requests)
  judge(count, requests)
  local granted = shed(count, requests)
  if not has(flags, DRY_RUN) then
    commit(count, requests, granted)
    commit_classes(count, requests)
  end
  return answer_drawn(count, granted and OP_GRANTED or OP_REFUSED)
end

-- Refusals that a node has repeated by itself count as if the store had been asked. Refusals while a key is blocked begin no
-- new block (W17).
local function count_told(count, requests)
  for i = 1, count do
    local at = index[i]
    local record, term = records[at], terms[at]
    touched[at] = true
    record[REQUESTS] = record[REQUESTS] + requests
    if how[i] == REFUSING then
      record[REFUSED] = record[REFUSED] + requests
      if term.block_for and blocked_us(record, term, now_us) == 0 then count_refusal(record, term, requests, now_us) end
    end
  end
  return string.char(OP_COUNTED)
end

local function decide(flags, count, requests)
  if flags == TOLD then return count_told(count, requests) end
  if flags >= DRAWN and has(flags, DRAWN) then return decide_drawn(flags, count, requests) end
  local granted = judge(count, requests)
  if flags == 0 or not has(flags, DRY_RUN) then commit(count, requests, granted) end
  return answer(count, granted and OP_GRANTED or OP_REFUSED)
end

-- A decision that was kept: layout, fingerprint, now_us, memo, answer. nil: none yet; false: bytes of something else (F-S11).
local decided = {}
local function recall(key)
  local kept = decided[key] or redis.pcall('GET', key)
  if not kept then return nil end
  if type(kept) == 'table' or #kept < KEPT_SIZE or string.byte(kept) ~= KEPT_LAYOUT then return false end
  local _, fingerprint, _, memo_size = unpack_struct('<Bc16dI', kept)
  local answer_size = #kept - KEPT_SIZE - memo_size
  if answer_size < 1 then return false end
  local row_size = string.byte(kept, KEPT_SIZE + memo_size + 1) >= SHEDS and SHEDS_ROW_SIZE or ANSWER_ROW_SIZE
  if (answer_size - 1) % row_size ~= 0 then return false end
  return fingerprint, string.sub(kept, 2 + FINGERPRINT_SIZE)
end

-- F-R7, F-R8: the first decision under an idempotency key stands; the memo lets any node rebuild the whole answer.
local function decide_once(key, fingerprint, memo, flags, count, requests)
  local first_fingerprint, first = recall(key)
  if first_fingerprint == false then return string.char(OP_CORRUPT) end
  if first_fingerprint == nil then
    local decision = decide(flags, count, requests)
    decided[key] = pack_struct('<Bc16dI', KEPT_LAYOUT, fingerprint, now_us, #memo) .. memo .. decision
    return decision
  end
  if first_fingerprint ~= fingerprint then return string.char(OP_CONFLICT) end
  return pack_struct('<BI', OP_REPLAYED, #first) .. first
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
  if flags >= DRAWN and has(flags, DRAWN) then class, draw, expected_ms, at = unpack_struct('<Bdd', operations, at) end
  if has(flags, IDEMPOTENT) then
    key, fingerprint, memo, at = unpack_struct('<Hc16Ic0', operations, at)
    key = KEYS[BEFORE + bucket_count + key]
  end
  weight, ttl_us, attempt = nil, 0, 0
  if flags >= WEIGHED then
    if has(flags, WEIGHED) then
      weight = {}
      for i = 1, count do weight[i], at = unpack_struct('<d', operations, at) end
    end
    if has(flags, LIVES) then ttl_us, at = unpack_struct('<d', operations, at) end
    if flags >= SECOND then attempt = flags >= FURTHER and FURTHER or SECOND end
    flags = flags % WEIGHED
  end
  for i = 1, count do
    learn_id[i] = 0
    if how[i] >= KEYED then how[i], learn_id[i], at = how[i] - KEYED, unpack_struct('<I', operations, at) end
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

write_records(raws, records, touched, now_us, is_sent)
for key, decision in pairs(decided) do call('SET', key, decision, 'PX', IDEMPOTENCY_TTL_MS) end
return finish(KEYS[1], answers)
