--[[ record: the live state of one bucket, kept as one string.
Layout: version byte, two bytes of flags, then fixed fields: in front all that an acquire of a plain bucket reads and,
before KEPT_UNTIL, all that it changes, so that it writes nothing else (SETRANGE); then room for what later versions count
with each acquire; then what a settle changes; then the terms, as the policy had them when last seen. Behind these stand
trailers, each where its flag says so and in this order: a latency histogram (with overload control one for each class),
the share of a bucket whose limit is divided over partitions, until when an auto bucket may count requests, what
overload control goes by, the refusals of a key that may be blocked, the slots of time in which open reservations are
counted. A new capability adds a flag and a trailer; a record with an unknown flag counts as damaged. Records of
version 1 are read, and written as version 2; so are those of version 2 with an older form of overload control.
Amounts and times stay float64: nothing passes through text, so the model in limiter/model/bucket/bucket.py,
shedding.py, block.py and in_flight.py, doing the same operations in the same order, agrees to the bit.
limiter/store/layout.py packs the same bytes. ]]

local pack_struct, unpack_struct, call = struct.pack, struct.unpack, redis.call

local VERSION, FLAGS = 1, 2
local UPDATED = 3      -- us, when the balance was last brought up to date
local BALANCE = 4      -- units of work, or requests; negative is debt; a quota's remainder
local REQUESTS, ADMITTED, REFUSED, WORK_CHARGED = 5, 6, 7, 8
local EPOCH = 9        -- int32, the sampling epoch in which this bucket was last listed
local KEPT_UNTIL = 10  -- uint32, s, when the key expires: never too early, moved about once a minute
local CHARGE = 11      -- W8: learned charge, 0 while nothing is learned
local ROOM = 12        -- 24 bytes: what is in flight, in this slot of time and in the one before (2 float64, see FLYING),
                       -- then second and further attempts (2 uint32)
local WORK_SETTLED, WORK_SQUARED = 13, 14
local SETTLES, MISSED, UNCOLLECTED = 15, 16, 17
local RATE = 18        -- refill per second: the committed rate, or the steered cap of a request bucket
local CAPACITY = 19    -- most the balance may be: capacity, burst, or a quota's limit
local COMMITTED = 20   -- this bucket's share of the policy's rate, when last seen
local DEBT_MAX = 21
local THRESHOLD = 22   -- W6: units if positive, a share of the charge if negative
local STOP_DEBT = 23   -- W7: debt beyond which a progress call answers stop
local HISTOGRAM = 24   -- raw counts, '' where the policy needs none
local SHARE = 25       -- B5: part of a divided limit, as the controller gave it; only records of divided limits have it
local SHARE_UNTIL = 26       -- us, when that ends and the bucket falls back to an equal part
local SHARE_PARTITIONS = 27  -- the number of partitions then; with another number the share is ignored
local REQUESTS_UNTIL = 28    -- R10: WORK_SETTLED at which an auto bucket counts work again; only auto records have it
local SHEDDING = 29    -- table: overload control; only records of policies with an `overload` block have it
local COUNTED_UNTIL, BLOCK_REFUSED, BLOCKED_UNTIL = 30, 31, 32  -- W17: us, refusals, us; only where a policy blocks keys
local SLOT_START, SLOT_BEFORE, SLOT_LENGTH = 33, 34, 35  -- us: when this slot and the one before began, how long it is
local SLOT_LONGEST = 36  -- us, the longest time to live that was admitted in this slot
local SLOT_REFUSED = 37  -- W18: requests that found all places taken
local FLYING, FLYING_BEFORE = 38, 39  -- open reservations of this slot and of the one before; packed in ROOM
local LEARNED_BY = 40  -- W15: entries { id, charge, settles, work, squared } by values of learn_by; only where LEARNS
-- B8: the parts of rate and capacity that are lent, the end of the last of them (us, own time), own time less the server's
-- (us), and the sums of what is lent, packed, which only lend.lua looks into; only where a policy lends.
local PARTS_RATE, PARTS_CAPACITY, PARTS_UNTIL, SHIFT, BOOK = 60, 61, 62, 63, 64
local WINDOW_END, WINDOW_START = 18, 20  -- RATE, COMMITTED: a quota has a window (us) where a rate bucket has rates

local LAYOUT, LAYOUT_BEFORE = 2, 1
local FIELDS = '<BHddddddiIdc24ddddddddddd'
local FIELDS_BEFORE = '<BBddddddddddddddddddd'
local SIZE, SIZE_BEFORE = 179, 154
local FRONT, CHANGING = 3, 131  -- bytes before the fields that acquires and settles change, and up to their end
local NO_ROOM = string.rep('\0', 24)
local SHARE_SIZE, REQUESTS_UNTIL_SIZE, BLOCK_SIZE, SLOTS_SIZE = 24, 8, 24, 40
local ENTRY_SIZE, ENTRIES_MAX = 36, 16  -- W15: bytes of an entry; so many values have one of their own
local ATTEMPTS, ATTEMPTS_MAX = 17, 4294967295  -- place of the attempts in ROOM, and their largest count
local QUOTA, COUNTS_REQUESTS, HAS_HISTOGRAM = 1, 2, 4  -- flag bits a record shares with its params
local DIVIDED = 8      -- the limit is divided over partitions: params say the whole, the record holds a share
local AUTO = 16        -- R10: the record's own COUNTS_REQUESTS says how it counts; steer.lua lends it for some work
local OVERLOAD = 32    -- the policy has an `overload` block
local BLOCK = 64       -- W17: the policy blocks keys
local IN_FLIGHT = 128  -- W18, S9: open reservations are counted
local LEARNS = 256     -- W15: the charge is learned before weights, and by values of learn_by
local LENDS = 512      -- B8: parts of the limit may be lent
local REFUNDS = 1024   -- W19: refunds have a threshold of their own, in params; the highest bit that a record has, so far
local BEYOND = 2048    -- flags from here on are unknown
local SHADOW = 32768   -- P11: of params only

-- What record[SHEDDING] holds; each class has its place in four numbers, class 0 (critical_plus) being the first.
local CLASSES = 4
local QUALITY = 1      -- S4: how good answers should be, 0 to 1; set by the controller
local STATE = 2        -- Q6: calm, degraded, recovering or overloaded, 0 to 3; set by the controller
local LENT_UNTIL = 3   -- Q11: us, when quality, state, shares and rates end; 0: none is in force, whatever stands there
local RESPONSE_MS = 4  -- Q13: median response time while overloaded, 0: not known or not overloaded; set by the controller
local SHED_SHARE = 5   -- Q4: share of a class's requests that is refused, 0 to 1; set by the controller
local SHED_RATE = 9    -- S3: requests per second of a class, 0: not limited; set by the controller
local SHED_TOKENS = 13 -- requests, or work (S11), that a class may send at once; come at its rate, a second's worth at most
local SHED_LIMIT = 17  -- S9: in flight from which on a class is refused, 0: not limited; set by the controller
local ASKED = 21       -- requests of a class
local SHED = 25        -- those of them that were refused
local SHED_RECENTLY = 29  -- S8: share of the latest requests of a class that was refused
local TIMED = 33       -- settled requests of a class
local LATE = 37        -- those of them that took longer than the target of their class
local SECONDS = 41     -- how long all of them took together
local SLACK_MIN = 42   -- ms, least of expected - actual since the bucket was last listed as touched
local SLACK_BEFORE = 43  -- ms, the same between the last two listings
local AHEAD = 44       -- Q13, S11: requests of a class refused so that others are spared, plus 1; 0: no other was refused yet
local MEDIAN_MS = 48   -- Q13: about how long half of the answers take that did not fail; 0: not known
local FAILED = 49      -- Q8: settled requests whose outcome counts as late, however fast the answer
local SHEDDING_FIELDS = '<ddddddddddddddddddddddddddddddddddddddddddddddddd'
local SHEDDING_SIZE, SHEDDING_COUNT = 392, 49
local SHEDDING_BEFORE_SIZE = 224  -- as it was in older records
local OVERLOADED = 3
local LENT_FOR_US, LENT_FOR_MAX_US = 10000000, 60000000
local RECENT, RECENT_MIN = 50, 10  -- about so many of the latest requests tell the share refused; the first ones weigh less

local OCTAVES, OCTAVE_MIN, STEPS = 26, -3, 7  -- histogram: 0.0625 ms to 70 minutes, seven steps to an octave
local HISTOGRAM_SIZE, HISTOGRAM_BEFORE_SIZE = 728, 576
local COUNT_MAX = 4294967295  -- of latencies in one step

local PARTS_SIZE, BOOK_HEAD_SIZE, SUMS_SIZE = 32, 49, 56
local LEAP_MAX_US = 1200000          -- while anything is lent, own time goes forward in one call by at most this,
local LEAP_PARTS = 3                 -- or by a third of what is left of the leases
local LENT_TTL_S = 86400             -- a bucket that lends is kept so long: a leap of the clock must not end it
local STEP_BACK_MAX_US = 1000000     -- a clock this far back waits for the past to catch up; further back re-anchors
local IDLE_TTL_S = 600               -- a bucket is kept at least this long after its last use
local TTL_MAX_S = 31622400           -- and at most 366 days
local KEPT_LONGER_S = 60             -- and this much longer, so that the expiry need not be moved with every use
local KEPT_MAX_S = 4294967295
local RATE_MAX = 9007199254740992    -- 2^53

local function has(flags, bit_value)
  return flags % (bit_value * 2) >= bit_value
end

--[[ Params: the terms of a policy for a bucket, one row each (limiter/store/layout.py). Rows are longer where keys are blocked,
where there is overload control, and where open reservations are counted. ]]
local PARAMS = '<Hddddddddddd'

local function unpack_params(rows)
  local params, at, size = {}, 1, #rows
  while at <= size do
    local flags, committed, cap, capacity, burst, burst_s, debt_max, threshold, stop_debt, window_start, window_end,
      partitions, after = unpack_struct(PARAMS, rows, at)
    local quota, counts_requests, overload = flags % 2 == QUOTA, flags % 4 >= COUNTS_REQUESTS, flags % 64 >= OVERLOAD
    local term = {
      flags = flags % SHADOW, quota = quota, histogram = flags % 8 >= HAS_HISTOGRAM, divided = flags % 16 >= DIVIDED,
      auto = flags % 32 >= AUTO, overload = overload, shadow = flags >= SHADOW, committed = committed,
      cap = cap, capacity = capacity, burst = burst, burst_s = burst_s, debt_max = debt_max, threshold = threshold,
      stop_debt = stop_debt, window_start = window_start, window_end = window_end, partitions = partitions,
      -- The capacity of a whole new bucket, in the unit of the minimums.
      whole_capacity = counts_requests and not quota and math.max(1, burst + burst_s * cap) or capacity,
    }
    at = after
    if flags % 128 >= BLOCK then
      term.block_after, term.block_in, term.block_for, at = unpack_struct('<ddd', rows, at)
    end
    if overload then  -- four targets (ms) and the first limit, read where they are needed
      term.overload_at, at = at, at + 40
    end
    if flags % 256 >= IN_FLIGHT then
      local in_work
      term.places, term.slot_length, in_work, at = unpack_struct('<ddd', rows, at)
      term.in_work = in_work == 1
    end
    if has(flags, REFUNDS) then term.refund_threshold, at = unpack_struct('<d', rows, at) end
    if has(flags, LENDS) then
      term.lend_bound, term.lend_need, term.lend_lease, at = unpack_struct('<ddd', rows, at)
    end
    params[#params + 1] = term
  end
  return params
end

-- B5: a share from the controller holds until its end and for its number of partitions; otherwise each has an equal part.
local function share_of(record, params, now_us)
  if not params.divided then return 1 end
  if now_us < record[SHARE_UNTIL] and record[SHARE_PARTITIONS] == params.partitions then return record[SHARE] end
  return 1 / params.partitions
end

-- R7: a burst given as time at the cap follows the cap. It is at least one token, because less could never admit anything.
local function burst_of(params, share, cap)
  return math.max(1, params.burst * share + params.burst_s * cap)
end

-- The rates and the capacity that a bucket starts with, in the unit that its flags say.
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

-- The debt bound. A request bucket may owe for the same time as a work bucket: requests / cap = work / committed.
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

-- S8: a bucket that no controller has seen may be limited from the start.
local function no_shedding(params, share)
  local shedding, limit = { 1 }, unpack_struct('<d', ARGV[2], params.overload_at + 32)
  for i = STATE, SECONDS do shedding[i] = 0 end
  if limit > 0 then
    limit = limit * share
    if limit < 1 then limit = 1 end
    for class = 0, CLASSES - 1 do shedding[SHED_LIMIT + class] = limit end
  end
  shedding[SLACK_MIN], shedding[SLACK_BEFORE] = math.huge, math.huge
  for i = AHEAD, FAILED do shedding[i] = 0 end
  return shedding
end

-- W18: open reservations are counted from now on. Earlier ones were not counted, and their settles free nothing.
local function begin_slots(record, params, now_us)
  record[SLOT_START], record[SLOT_BEFORE], record[SLOT_LENGTH] = now_us, now_us, params.slot_length
  record[SLOT_LONGEST], record[SLOT_REFUSED], record[FLYING], record[FLYING_BEFORE] = 0, 0, 0, 0
end

local function begin_lending(record)
  for i = PARTS_RATE, SHIFT do record[i] = 0 end
  record[BOOK] = string.rep('\0', BOOK_HEAD_SIZE)
end

local function fresh_record(params, now_us)
  local record = { LAYOUT, params.flags, now_us, 0, 0, 0, 0, 0, -1, 0, 0, NO_ROOM, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    no_latencies(params), 0, 0, 0, 0 }
  if params.block_for then record[COUNTED_UNTIL], record[BLOCK_REFUSED], record[BLOCKED_UNTIL] = 0, 0, 0 end
  if params.places then begin_slots(record, params, now_us) end
  if has(params.flags, LEARNS) then record[LEARNED_BY] = {} end
  if params.lend_need then begin_lending(record) end
  local share = share_of(record, params, now_us)
  if params.overload then record[SHEDDING] = no_shedding(params, share) end
  begin_terms(record, params, share)
  adopt_bounds(record, params, share)
  record[BALANCE] = record[CAPACITY]
  return record
end

-- Whether what is in force is something that the controller may set. Written so that NaN fails as well.
local function is_sound(shedding)
  local lent_until, a, b, c, d = shedding[LENT_UNTIL], shedding[17], shedding[18], shedding[19], shedding[20]  -- SHED_LIMIT
  if not (lent_until >= 0 and lent_until <= RATE_MAX and a >= 0 and a <= RATE_MAX and b >= 0 and b <= RATE_MAX
    and c >= 0 and c <= RATE_MAX and d >= 0 and d <= RATE_MAX) then return false end
  a, b, c, d = shedding[44], shedding[45], shedding[46], shedding[47]  -- AHEAD
  if not (a >= 0 and a <= RATE_MAX and b >= 0 and b <= RATE_MAX and c >= 0 and c <= RATE_MAX and d >= 0
    and d <= RATE_MAX) then return false end
  if lent_until == 0 then return true end
  local state, response_ms = shedding[STATE], shedding[RESPONSE_MS]
  if not (shedding[QUALITY] >= 0 and shedding[QUALITY] <= 1 and (state == 0 or state == 1 or state == 2 or state == 3)
    and response_ms >= 0 and response_ms <= RATE_MAX) then
    return false
  end
  for class = 0, CLASSES - 1 do
    local share, rate, tokens = shedding[SHED_SHARE + class], shedding[SHED_RATE + class], shedding[SHED_TOKENS + class]
    if not (share >= 0 and share <= 1 and rate >= 0 and rate <= RATE_MAX and tokens >= -RATE_MAX and tokens <= RATE_MAX) then
      return false
    end
  end
  return true
end

-- W15: the entries, behind what has a fixed size; where they end, nil if they are not all there or a charge is none that
-- the controller may set.
local function unpack_learned(record, raw, size, at)
  local count, entries = string.byte(raw, at + 1), {}
  if not count or size < at + 1 + count * ENTRY_SIZE then return nil end
  at = at + 2
  for i = 1, count do
    local id, charge, settles, work, squared
    id, charge, settles, work, squared, at = unpack_struct('<Idddd', raw, at)
    if not (charge >= 0 and charge <= RATE_MAX) then return nil end
    entries[i] = { id, charge, settles, work, squared }
  end
  record[LEARNED_BY] = entries
  return at - 1
end

-- B8: four numbers that make sense, written so that NaN fails as well, and the book; where it ends, nil if it is none.
local function unpack_lending(record, raw, size, at)
  local count = string.byte(raw, at + PARTS_SIZE + 1)
  local last = count and at + PARTS_SIZE + BOOK_HEAD_SIZE + count * SUMS_SIZE
  if not count or size < last then return nil end
  local rate, capacity, until_us, shift, from = unpack_struct('<dddd', raw, at + 1)
  record[PARTS_RATE], record[PARTS_CAPACITY], record[PARTS_UNTIL], record[SHIFT] = rate, capacity, until_us, shift
  record[BOOK] = string.sub(raw, from, last)
  if not (rate >= 0 and rate < math.huge and capacity >= 0 and capacity <= 1 and until_us >= 0 and until_us <= RATE_MAX
    and shift > -RATE_MAX and shift < RATE_MAX) then return nil end
  return last
end

-- Read the trailers that the flags announce; return whether size and values are valid.
local function unpack_rest(record, raw, size, at)
  local flags = record[FLAGS]
  local with_histogram, divided, overload = flags % 8 >= HAS_HISTOGRAM, flags % 16 >= DIVIDED, flags % 64 >= OVERLOAD
  local auto, block, in_flight = flags % 32 >= AUTO, flags % 128 >= BLOCK, flags % 256 >= IN_FLIGHT
  local histograms = with_histogram and (overload and CLASSES or 1) or 0
  local rest = at + (divided and SHARE_SIZE or 0) + (auto and REQUESTS_UNTIL_SIZE or 0) + (block and BLOCK_SIZE or 0)
    + (in_flight and SLOTS_SIZE or 0)
  local learns, lends = has(flags, LEARNS), has(flags, LENDS)
  local is_old = size == rest + histograms * HISTOGRAM_BEFORE_SIZE + (overload and SHEDDING_BEFORE_SIZE or 0)
    and (overload or with_histogram) and not in_flight and not learns and not lends
  if learns or lends then  -- last, with sizes given by their counts
    local fixed_size = rest + histograms * HISTOGRAM_SIZE + (overload and SHEDDING_SIZE or 0)
    local behind = fixed_size
    if learns then behind = unpack_learned(record, raw, size, behind) end
    if lends then behind = behind and unpack_lending(record, raw, size, behind) end
    if behind ~= size then return false end
    size = fixed_size
  end
  if is_old then
    record[HISTOGRAM] = string.rep('\0', histograms * HISTOGRAM_SIZE)
    at = at + histograms * HISTOGRAM_BEFORE_SIZE + 1
  elseif size == rest + histograms * HISTOGRAM_SIZE + (overload and SHEDDING_SIZE or 0) then
    record[HISTOGRAM] = string.sub(raw, at + 1, at + histograms * HISTOGRAM_SIZE)
    at = at + histograms * HISTOGRAM_SIZE + 1
  else
    return false
  end
  if divided then
    record[SHARE], record[SHARE_UNTIL], record[SHARE_PARTITIONS], at = unpack_struct('<ddd', raw, at)
    if not (record[SHARE] > 0 and record[SHARE] <= 1 or record[SHARE_PARTITIONS] == 0) then return false end
  end
  if auto then record[REQUESTS_UNTIL], at = unpack_struct('<d', raw, at) end
  if overload then
    if is_old then  -- converted to this version; values had no end then
      local old, shedding = { unpack_struct('<' .. string.rep('d', 28), raw, at) }, {}
      for i = STATE, SECONDS do shedding[i] = 0 end
      shedding[1], shedding[STATE], shedding[LENT_UNTIL] = old[1], old[2] * OVERLOADED, record[UPDATED] + LENT_FOR_US
      for class = 0, CLASSES - 1 do
        shedding[SHED_SHARE + class], shedding[SHED_RATE + class] = old[3 + class], old[7 + class]
        shedding[SHED_TOKENS + class], shedding[SHED + class] = old[11 + class], old[15 + class]
        shedding[TIMED + class], shedding[ASKED + class] = old[19 + class], old[15 + class] + old[19 + class]
      end
      shedding[SLACK_MIN], shedding[SLACK_BEFORE] = old[27], old[28]
      for i = AHEAD, FAILED do shedding[i] = 0 end
      record[SHEDDING], at = shedding, at + SHEDDING_BEFORE_SIZE
    else
      record[SHEDDING], at = { unpack_struct(SHEDDING_FIELDS, raw, at) }, at + SHEDDING_SIZE
    end
    if not is_sound(record[SHEDDING]) then return false end
  end
  if block then
    local counted_until, refused, blocked_until
    counted_until, refused, blocked_until, at = unpack_struct('<ddd', raw, at)
    record[COUNTED_UNTIL], record[BLOCK_REFUSED], record[BLOCKED_UNTIL] = counted_until, refused, blocked_until
    if not (counted_until >= 0 and refused >= 0 and blocked_until >= 0 and blocked_until < math.huge) then
      return false
    end
  end
  if not in_flight then return true end
  local flying, before = unpack_struct('<dd', record[ROOM])
  local start, before_start, length, longest, refused = unpack_struct('<ddddd', raw, at)
  record[FLYING], record[FLYING_BEFORE] = flying, before
  record[SLOT_START], record[SLOT_BEFORE], record[SLOT_LENGTH] = start, before_start, length
  record[SLOT_LONGEST], record[SLOT_REFUSED] = longest, refused
  return flying >= 0 and flying <= RATE_MAX and before >= 0 and before <= RATE_MAX and before_start >= 0
    and before_start <= start and start <= RATE_MAX and length >= 0 and length <= RATE_MAX
    and longest >= 0 and longest <= RATE_MAX and refused >= 0 and refused <= RATE_MAX
end

-- The fixed fields of a record in this version's order, and their size in bytes; nil if the version is unknown.
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

-- F-S11: nil if these bytes are not a valid record.
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
  local flags = record[FLAGS]
  if flags % 256 >= IN_FLIGHT then
    record[ROOM] = pack_struct('<dd', record[FLYING], record[FLYING_BEFORE]) .. string.sub(record[ROOM], ATTEMPTS)
  end
  local packed = pack_struct(FIELDS, unpack(record, 1, 23))
  if flags < HAS_HISTOGRAM then return packed end
  packed = packed .. record[HISTOGRAM]
  if flags % 16 >= DIVIDED then
    packed = packed .. pack_struct('<ddd', record[SHARE], record[SHARE_UNTIL], record[SHARE_PARTITIONS])
  end
  if flags % 32 >= AUTO then packed = packed .. pack_struct('<d', record[REQUESTS_UNTIL]) end
  local shedding = record[SHEDDING]
  if shedding then packed = packed .. pack_struct(SHEDDING_FIELDS, unpack(shedding, 1, SHEDDING_COUNT)) end
  if flags < BLOCK then return packed end
  if flags % 128 >= BLOCK then
    packed = packed .. pack_struct('<ddd', record[COUNTED_UNTIL], record[BLOCK_REFUSED], record[BLOCKED_UNTIL])
  end
  if flags % 256 >= IN_FLIGHT then
    packed = packed .. pack_struct('<ddddd', unpack(record, SLOT_START, SLOT_REFUSED))
  end
  if flags < LEARNS then return packed end
  if has(flags, LEARNS) then
    local entries = record[LEARNED_BY]
    packed = packed .. string.char(#entries)
    for i = 1, #entries do packed = packed .. pack_struct('<Idddd', unpack(entries[i])) end
  end
  if not has(flags, LENDS) then return packed end
  return packed .. pack_struct('<dddd', unpack(record, PARTS_RATE, SHIFT)) .. record[BOOK]
end

-- W15: the entry of an id, nil if there is none yet; and the number of entries besides the common one.
local function find_learned(entries, id)
  local others, rest = 0, nil
  for i = 1, #entries do
    local entry = entries[i]
    if entry[1] == id then return entry, others end
    if entry[1] == 0 then rest = entry else others = others + 1 end
  end
  return others >= ENTRIES_MAX and rest or nil, others
end

-- The same, made if there is none.
local function entry_for(entries, id)
  local entry, others = find_learned(entries, id)
  if not entry then
    entry = { others < ENTRIES_MAX and id or 0, 0, 0, 0, 0 }
    entries[#entries + 1] = entry
  end
  return entry
end

-- Records by number, from the reply of MGET; bucket i is raws[before + i]. false: there is none yet; nil: the key holds
-- something else, which is not touched (F-S11).
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

local function end_lent(shedding)
  shedding[QUALITY] = 1
  for i = STATE, SHED_TOKENS + CLASSES - 1 do shedding[i] = 0 end
  for i = AHEAD, AHEAD + CLASSES - 1 do shedding[i] = 0 end
end

-- S3: a class that is limited may gather the requests of one second, and one at least. Q11: what was lent ends when its
-- time is over, and where a clock that went back would make that longer. Without a throttle there is nothing to do.
local function refill_classes(shedding, elapsed_us, now_us)
  local until_us = shedding[LENT_UNTIL]
  if not (now_us < until_us and until_us <= now_us + LENT_FOR_MAX_US) then
    end_lent(shedding)
    return
  end
  if not (elapsed_us > 0) then return end
  for class = 0, CLASSES - 1 do
    local rate = shedding[SHED_RATE + class]
    if rate > 0 then
      local tokens, most = shedding[SHED_TOKENS + class] + elapsed_us * rate / 1e6, rate > 1 and rate or 1
      shedding[SHED_TOKENS + class] = tokens < most and tokens or most
    end
  end
end

-- W18, S9: bring the slots to now. A clock that steps back a little lets the slot begin then, one that steps back far makes
-- one slot of both; one that jumps ahead empties them.
local function roll_slots(record, now_us)
  local start, length = record[SLOT_START], record[SLOT_LENGTH]
  if now_us < start then
    if now_us < start - STEP_BACK_MAX_US then
      record[FLYING], record[FLYING_BEFORE] = record[FLYING] + record[FLYING_BEFORE], 0
      record[SLOT_BEFORE] = now_us
    end
    record[SLOT_START] = now_us
    if now_us < record[SLOT_BEFORE] then record[SLOT_BEFORE] = now_us end
    return
  end
  local slot_end = start + length
  if now_us < slot_end then return end
  if record[SLOT_LONGEST] > 0 then length = record[SLOT_LONGEST] end
  if now_us < slot_end + length then
    record[FLYING_BEFORE], record[SLOT_BEFORE], record[SLOT_START] = record[FLYING], start, slot_end
  else
    record[FLYING_BEFORE], record[SLOT_BEFORE], record[SLOT_START] = 0, now_us, now_us
  end
  record[FLYING], record[SLOT_LENGTH], record[SLOT_LONGEST] = 0, length, 0
end

-- Count an admitted request with its time to live.
local function take_place(record, params, amount, ttl_us)
  record[FLYING] = record[FLYING] + amount
  if params.slot_length > 0 then return end
  if ttl_us > record[SLOT_LONGEST] then record[SLOT_LONGEST] = ttl_us end
  if ttl_us > record[SLOT_LENGTH] then record[SLOT_LENGTH] = ttl_us end
end

-- W16, W15: whether a request counts by its weight: in buckets with a cap, in those that may get one, and in those that learn
-- their charge before weights.
local function weighs(flags)
  return flags % HAS_HISTOGRAM == COUNTS_REQUESTS or has(flags, AUTO) or has(flags, LEARNS)
end

-- The most that the bucket itself may hold: less while parts of it are lent.
local function free_capacity(record)
  if not has(record[FLAGS], LENDS) then return record[CAPACITY] end
  return record[CAPACITY] * (1 - record[PARTS_CAPACITY])
end

-- B8: a bound does not grow with the capacity: neither does what the bucket itself may hold of it.
local function keep_lent(record, before, bound, capacity)
  if bound == 0 or record[PARTS_UNTIL] <= record[UPDATED] + record[SHIFT] then return end
  local own = free_capacity(record) * (capacity + bound) / (record[CAPACITY] + before)
  record[PARTS_CAPACITY] = 1 - math.min(1, own / capacity)
end

-- B8: credit a bucket that may have lent parts of itself, by what is lent as long as that lasts.
local function refill_lending(record, elapsed_us)
  local tau = record[UPDATED] + record[SHIFT]
  if record[PARTS_UNTIL] > tau then
    local believed_us = math.max(LEAP_MAX_US, (record[PARTS_UNTIL] - tau) / LEAP_PARTS)
    if elapsed_us > believed_us then
      record[SHIFT] = record[SHIFT] - (elapsed_us - believed_us)
      elapsed_us = believed_us
    end
    local lent_us = math.min(elapsed_us, record[PARTS_UNTIL] - tau)
    local balance = record[BALANCE] + lent_us * record[RATE] * (1 - record[PARTS_RATE]) / 1e6
    record[BALANCE] = math.min(balance, free_capacity(record))
    elapsed_us = elapsed_us - lent_us
    if elapsed_us <= 0 then return end
  end
  record[PARTS_RATE], record[PARTS_CAPACITY] = 0, 0
  record[BALANCE] = math.min(record[BALANCE] + elapsed_us * record[RATE] / 1e6, record[CAPACITY])
end

-- W1, F-T1, F-T2: credit the time since the last update; nothing if the clock went back.
local function refill(record, now_us)
  local elapsed_us = now_us - record[UPDATED]
  if elapsed_us > 0 then
    if record[FLAGS] >= LENDS and has(record[FLAGS], LENDS) and record[FLAGS] % 2 ~= QUOTA then
      refill_lending(record, elapsed_us)
    elseif record[FLAGS] % 2 ~= QUOTA then
      local balance, capacity = record[BALANCE] + elapsed_us * record[RATE] / 1e6, record[CAPACITY]
      if balance > capacity then balance = capacity end
      record[BALANCE] = balance
    end
    record[UPDATED] = now_us
  elseif elapsed_us < -STEP_BACK_MAX_US then
    if record[FLAGS] >= LENDS and has(record[FLAGS], LENDS) then record[SHIFT] = record[SHIFT] - elapsed_us end  -- its own time stands still
    record[UPDATED] = now_us
  end
  local shedding = record[SHEDDING]
  if shedding and shedding[LENT_UNTIL] ~= 0 then
    if record[FLAGS] >= LENDS and has(record[FLAGS], LENDS) then elapsed_us = elapsed_us * (1 - record[PARTS_RATE]) end
    refill_classes(shedding, elapsed_us, now_us)
  end
  if record[FLAGS] % 256 >= IN_FLIGHT then roll_slots(record, now_us) end
end

-- P4: in a later window the quota starts again; an earlier window means that the clock went back, and nothing changes.
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

-- R10: count in another unit from now on. The balance, debt or surplus, is worth the same time as before. A quota has no rate
-- and so no such time: there the balance keeps its share of the capacity.
local function recount(record, params, share, flags, cap)
  local balance, rate, capacity = record[BALANCE], record[RATE], record[CAPACITY]
  local timeless = params.quota or has(record[FLAGS], QUOTA)
  record[FLAGS] = flags
  begin_terms(record, params, share)
  if cap then record[RATE] = cap end
  balance = timeless and balance / capacity * record[CAPACITY] or balance * record[RATE] / rate
  record[BALANCE] = balance > -RATE_MAX and balance or -RATE_MAX
end

-- The part of a debit that can be collected before the debt reaches its bound (W5).
local function collectable(record, amount)
  local room = record[BALANCE] + record[DEBT_MAX]
  if not (room > 0) then room = 0 end  -- not even minus zero
  if amount > room then return room end
  return amount
end

-- R10: an auto bucket counts requests for a certain amount of settled work. Work beyond it is debited like any other (W5).
local function repay(record, params, share)
  local overrun = record[WORK_SETTLED] - record[REQUESTS_UNTIL]
  if overrun > 0 then
    adopt_bounds(record, params, share)
    record[BALANCE] = record[BALANCE] - collectable(record, overrun)
  end
end

-- The kind of bucket that a policy asks for now. An auto bucket counts requests only until REQUESTS_UNTIL.
local function convert(record, params, now_us)
  local before, flags = record[FLAGS], params.flags
  if params.auto and before % HAS_HISTOGRAM == COUNTS_REQUESTS
    and record[WORK_SETTLED] < (record[REQUESTS_UNTIL] or 0) then flags = flags + COUNTS_REQUESTS end
  -- A part that is lent stays lent until its end, even if the policy no longer lends.
  if has(before, LENDS) and not params.lend_need and record[PARTS_UNTIL] > record[UPDATED] + record[SHIFT] then
    flags = flags + LENDS
  end
  if before == flags then return end
  if has(flags, LENDS) and not has(before, LENDS) then begin_lending(record) end
  local overload = has(before, OVERLOAD)
  if has(before, HAS_HISTOGRAM) ~= params.histogram or overload ~= params.overload then
    record[HISTOGRAM] = no_latencies(params)
  end
  if has(before, DIVIDED) ~= params.divided then
    record[SHARE], record[SHARE_UNTIL], record[SHARE_PARTITIONS] = 0, 0, 0
  end
  if has(before, AUTO) ~= params.auto then record[REQUESTS_UNTIL] = 0 end
  if overload ~= params.overload then
    record[SHEDDING] = params.overload and no_shedding(params, share_of(record, params, now_us)) or nil
  end
  if params.block_for and not has(before, BLOCK) then
    record[COUNTED_UNTIL], record[BLOCK_REFUSED], record[BLOCKED_UNTIL] = 0, 0, 0
  end
  if has(before, IN_FLIGHT) then
    if not params.places then record[ROOM] = string.rep('\0', ATTEMPTS - 1) .. string.sub(record[ROOM], ATTEMPTS) end
  elseif params.places then
    begin_slots(record, params, now_us)
  end
  if has(before, LEARNS) ~= has(flags, LEARNS) then record[LEARNED_BY], record[CHARGE] = {}, 0 end
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
    if params.lend_need and capacity > record[CAPACITY] then
      local bound, share_before = params.lend_bound, math.min(1, math.max(share, record[COMMITTED] / params.committed))
      keep_lent(record, bound * share_before, bound * share, capacity)
    end
    record[COMMITTED] = committed
  end
  record[CAPACITY] = capacity
  if record[FLAGS] >= LENDS and has(record[FLAGS], LENDS) then capacity = free_capacity(record) end
  if record[BALANCE] > capacity then record[BALANCE] = capacity end
  adopt_bounds(record, params, share)
  if params.places and params.slot_length > 0 then
    record[SLOT_LENGTH], record[SLOT_LONGEST] = params.slot_length, 0
  end
end

-- Bring a bucket to now under the old terms, then to the terms of the policy.
local function advance(record, params, now_us)
  local stepped_back = record[UPDATED] - now_us > STEP_BACK_MAX_US
  refill(record, now_us)
  if params.quota and has(record[FLAGS], QUOTA) then roll(record, params, stepped_back) end
  adopt(record, params, now_us)
end

-- A record is needed until the bucket would be full again, until it has been idle for a while, and until its share ends: if
-- it expired earlier, the bucket would get an equal part while others still hold what it gave up.
local function needed_until_s(record, now_us)
  local s
  local flags = record[FLAGS]
  if flags % 2 == QUOTA then
    s = (record[WINDOW_END] - now_us) / 1e6
  else
    s = (record[CAPACITY] - record[BALANCE]) / record[RATE]
  end
  if flags % 16 >= DIVIDED then s = math.max(s, (record[SHARE_UNTIL] - now_us) / 1e6) end
  if flags % 128 >= BLOCK then
    s = math.max(s, (record[COUNTED_UNTIL] - now_us) / 1e6, (record[BLOCKED_UNTIL] - now_us) / 1e6)
  end
  if flags % 256 >= IN_FLIGHT and record[FLYING] + record[FLYING_BEFORE] > 0 then
    s = math.max(s, (record[SLOT_START] + 2 * record[SLOT_LENGTH] - now_us) / 1e6)
  end
  if flags >= LENDS and has(flags, LENDS) and record[PARTS_UNTIL] > record[UPDATED] + record[SHIFT] then s = math.max(s, LENT_TTL_S) end
  if not (s < TTL_MAX_S) then return now_us / 1e6 + TTL_MAX_S end
  return now_us / 1e6 + ((s > 0 and s or 0) + IDLE_TTL_S)
end

-- The key's new expiry (s), if the present one is too early, or later than the record is needed; otherwise nil.
local function keep(record, now_us)
  local needed_s, kept_s = needed_until_s(record, now_us), record[KEPT_UNTIL]
  if kept_s >= needed_s and kept_s <= needed_s + 2 * KEPT_LONGER_S then return nil end
  kept_s = math.ceil(needed_s) + KEPT_LONGER_S
  record[KEPT_UNTIL] = kept_s < KEPT_MAX_S and kept_s or KEPT_MAX_S
  return kept_s
end

-- The expiry as arguments of SET: absolute, or relative if a test sent its own time, which is not the server's.
local function expiry(kept_s, now_us, is_sent)
  if is_sent then return 'PX', math.ceil(kept_s * 1000 - now_us / 1000) end
  return 'PXAT', kept_s .. '000'
end

-- Write a record; only the fields that acquires and settles change, if the others are as they were read.
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

-- Nodes compute calendar windows. A window that does not contain the server's time is reported and not used (F-T4).
local function in_window(params, now_us)
  return not params.quota or (now_us >= params.window_start and now_us < params.window_end)
end
