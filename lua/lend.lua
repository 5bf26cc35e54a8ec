#!lua
--[[ lend: a holder says what it did, holds and wants, and is answered what it may use until its lease ends (B8, P9).
KEYS[1]   row           string, the lease as it was last answered; kept a while after its end
KEYS[2]   sampling      string, number of the sampling epoch, moved by the controller
KEYS[3]   touched       list of the buckets changed since the last sampling
KEYS[4..] buckets       string records with their books, see lib/record.lua; after them the index of the slot's leases
ARGV[1]   head          now_us (0 = server clock; only tests send one, below 0 to have the general form decide),
                        expires_us (0 = never), number of buckets
ARGV[2]   params        rows of policy parameters, see lib/record.lua
ARGV[3]   terms         for each bucket the number of its row in params
ARGV[4]   operation     kind, number, taken, the holder's weight, what it did since the lease began (nine sums); for each
                        bucket: held, wanted, debt, moved, weight of work, refused, 1 if each request is charged
                        alike. To revoke a lease takes no bucket
ARGV[5]   member        the lease in the index
RETURNS   one string: done or expired, now_us, status; then for each bucket rate, capacity, tokens, share, moved, balance,
          end_us, learned charge, part of the capacity, share of a divided limit; where it has overload control also
          quality, state, and by class the share refused, rate and limit; limiter/store/leases/lease_layout.py reads it
HOLDS     bucket and slices together hold at most the capacity and the bound, and refill at most at the rate; a repeat is
          answered as before and changes nothing; an older number changes nothing; what a holder did counts once; debt comes
          back always, tokens only in time; what is not ours is left as it is ]]

local BEFORE = 3  -- keys before those of the buckets
local REPLY_TTL_MS = 10000  -- as of batched calls: one that comes later does nothing
local DONE, EXPIRED = 1, 2  -- first byte of a reply
local LENT, OUTDATED, UNKNOWN, CLOSED, RETURNED, WINDOW, CORRUPT = 1, 2, 3, 4, 5, 6, 7
local RENEW, REVOKE = 1, 3
local GIVEN_BACK, REVOKED = 1, 2  -- first byte of a row; 0: open
local DEFAULT_CLASS = 1  -- what holders say of answers does not tell classes apart
local GRAIN_US, MARGIN_US, ROW_KEPT_US, SMOOTH_US, PLAIN_MIN_US = 500000, 500000, 5000000, 1000000, 100000
local USED, PART_SIZE, ROW_HEAD_SIZE = 9, 120, 89
-- Of a part: what one bucket was last answered.
local END_US, P_RATE, P_CAPACITY, P_HELD_RATE, P_HELD_CAPACITY, P_TOKENS, P_MOVED = 1, 2, 3, 4, 5, 6, 7
local P_PERIOD, P_GIVEN, P_REFUSED, P_CONTENT, P_SHORT, P_DEMAND, P_LEVEL, P_AT = 8, 9, 10, 11, 12, 13, 14, 15

-- Of a book: own time when it was last opened, the plain callers' demand and when it was last followed, what the record had
-- counted then, and the sums of each end: end, rate, capacity, weight of the holders, content, short, demand.
local BOOK_TAU, BOOK_PLAIN, BOOK_PLAIN_AT, BOOK_WORK, BOOK_REQUESTS, BOOK_ADMITTED, BOOK_ENDS = 1, 2, 3, 4, 5, 6, 7

-- Of the plain case: bytes of its params and of a record as far as KEPT_UNTIL and ROOM, and the most ends that it takes.
local LENT_PARAMS_SIZE, BEHIND_KEPT, BEHIND_ROOM, ENDS_MAX = 114, 59, 91, 24

local call, pack_struct, unpack_struct = redis.call, struct.pack, struct.unpack
local now_us, expires_us, count = unpack_struct('<ddH', ARGV[1])
local is_sent = now_us ~= 0  -- by a test; the server's clock is another
local is_general = now_us < 0  -- and it wants the general case, whatever is asked
if is_general then
  now_us = -now_us
elseif not is_sent then
  local time = call('TIME')
  now_us = time[1] * 1000000 + time[2]
end
if expires_us > 0 and (now_us > expires_us or expires_us > now_us + REPLY_TTL_MS * 1000) then
  return pack_struct('<Bd', EXPIRED, now_us)
end

local raws = call('MGET', unpack(KEYS, 1, BEFORE + count))
local kind, number, taken, weight, at = unpack_struct('<Bddd', ARGV[4])

--[[ The plain case: an open lease on one bucket is renewed, which counts work, has no trailer but that of lending, and stands
to the terms of its policy. It computes the same as the general case, in the same order, with locals and a single function,
because each function that is defined costs time in every call. It returns nil if it finds anything else. Nothing has been
written by then, and the general case starts from the beginning. ]]
local function renew_plain()
  local row, raw, max, min, sub, huge = raws[1], raws[BEFORE + 1], math.max, math.min, string.sub, math.huge
  if not row or not raw or #row ~= ROW_HEAD_SIZE + PART_SIZE then return nil end
  if #ARGV[2] ~= LENT_PARAMS_SIZE then return nil end
  local flags, rate, _, capacity, _, _, debt_max, threshold, stop_debt, _, _, _, bound, need, lease_us
    = unpack_struct('<Hdddddddddddddd', ARGV[2])
  if flags ~= LENDS then return nil end
  local whole = capacity + bound
  local standing, size = sub(raw, CHANGING + 1, SIZE), #raw
  if size < SIZE + PARTS_SIZE + BOOK_HEAD_SIZE
    or standing ~= pack_struct('<dddddd', rate, capacity, rate, debt_max, threshold, stop_debt) then return nil end
  local version, record_flags, updated, balance, requests, admitted, refused, work_charged, epoch, kept_s, charge
    = unpack_struct('<BHddddddiId', raw)
  local parts_rate, parts_capacity, parts_until, shift, count_ends, book_tau, plain_rate, plain_at, seen_work,
    seen_requests, seen_admitted, ends_at = unpack_struct('<ddddBdddddd', raw, SIZE + 1)
  if version ~= LAYOUT or record_flags ~= LENDS or size ~= ends_at - 1 + count_ends * SUMS_SIZE or count_ends > ENDS_MAX
    or not (balance > -huge and balance <= capacity and updated > 0 and book_tau ~= 0
      and parts_rate >= 0 and parts_rate < huge and parts_capacity >= 0 and parts_capacity <= 1
      and parts_until >= 0 and parts_until <= RATE_MAX and shift > -RATE_MAX and shift < RATE_MAX) then return nil end

  local state, row_number, row_weight, did_requests, did_refuse, did_charge, did_work, did_square, did_settle, did_answer,
    did_late, did_seconds, end_us, p_rate, p_capacity, p_held_rate, p_held_capacity, p_tokens, p_moved, p_period, _,
    p_refused, p_content, p_short, p_demand, p_level, p_at = unpack_struct('<Bdddddddddddddddddddddddddd', row)
  if state ~= 0 or number <= row_number or p_period ~= 0 then return nil end

  -- Bring the bucket to now: see refill and refill_lending.
  local elapsed_us = now_us - updated
  if elapsed_us > 0 then
    local tau, left_us = updated + shift, elapsed_us
    if parts_until > tau then
      local believed_us = max(LEAP_MAX_US, (parts_until - tau) / LEAP_PARTS)
      if left_us > believed_us then
        shift = shift - (left_us - believed_us)
        left_us = believed_us
      end
      local lent_us = min(left_us, parts_until - tau)
      balance = min(balance + lent_us * rate * (1 - parts_rate) / 1e6, capacity * (1 - parts_capacity))
      left_us = left_us - lent_us
    end
    if parts_until <= tau or left_us > 0 then
      parts_capacity = 0
      balance = min(balance + left_us * rate / 1e6, capacity)
    end
    updated = now_us
  elseif elapsed_us < -STEP_BACK_MAX_US then
    shift = shift - elapsed_us
    updated = now_us
  end
  if balance > capacity * (1 - parts_capacity) then balance = capacity * (1 - parts_capacity) end

  -- Open the book: see open_book and follow_plain.
  local tau = updated + shift
  if tau < book_tau then
    shift = shift + (book_tau - tau)
    tau = book_tau
  end
  if tau > end_us + ROW_KEPT_US then return nil end
  elapsed_us = tau - plain_at
  if elapsed_us >= PLAIN_MIN_US then
    local asked, new = need, admitted - seen_admitted
    if new > 0 then asked = (work_charged - seen_work) / new end
    asked = (requests - seen_requests) * asked / elapsed_us * 1e6
    plain_rate = plain_rate + elapsed_us / (elapsed_us + SMOOTH_US) * (asked - plain_rate)
    plain_at, seen_work, seen_requests, seen_admitted = tau, work_charged, requests, admitted
  end

  -- Seven numbers of each end; what has ended goes, and this lease's part is taken out.
  local sums, behind, is_live = { unpack_struct('<' .. string.rep('ddddddd', count_ends), raw, ends_at) }, 0, false
  local rates, capacities, holders, content, short, demands = 0, 0, 0, 0, 0, 0
  for at = 1, count_ends * 7, 7 do
    if sums[at] > tau then
      local a, b, c, d, e, f, g = unpack(sums, at, at + 6)
      if a == end_us and not is_live then
        is_live = true
        b, c = max(0, b - max(p_rate, p_held_rate)), max(0, c - max(p_capacity, p_held_capacity))
        d, e, f, g = max(0, d - row_weight), max(0, e - p_content), max(0, f - p_short), max(0, g - p_demand)
      end
      sums[behind + 1], sums[behind + 2], sums[behind + 3], sums[behind + 4] = a, b, c, d
      sums[behind + 5], sums[behind + 6], sums[behind + 7] = e, f, g
      behind = behind + 7
      rates, capacities, holders = rates + b, capacities + c, holders + d
      content, short, demands = content + e, short + f, demands + g
    end
  end

  local _, _, _, _, asked_requests, asked_refused, asked_charge, asked_work, asked_square, asked_settle, asked_answer,
    asked_late, asked_seconds, said_held, said_wanted, said_debt, said_moved, each, said_refused, by_request
    = unpack_struct('<Bddddddddddddddddddd', ARGV[4])
  asked_requests, asked_refused = max(asked_requests, did_requests), max(asked_refused, did_refuse)
  asked_charge, asked_work = max(asked_charge, did_charge), max(asked_work, did_work)
  asked_square, asked_settle = max(asked_square, did_square), max(asked_settle, did_settle)
  asked_answer, asked_late = max(asked_answer, did_answer), max(asked_late, did_late)
  asked_seconds = max(asked_seconds, did_seconds)

  -- Draft: what the holder may be using, what it gets; see left_at_most, draft and fair.
  local held_rate, held_capacity, left = 0, 0, 0
  if is_live then
    if taken == row_number then
      left = min(p_level + (tau - p_at) * p_rate * rate / 1e6, p_capacity * whole)
      held_rate, held_capacity = min(p_rate, said_held), p_capacity
    else
      left = min(p_level - p_tokens + (tau - p_at) * p_held_rate * rate / 1e6, p_held_capacity * whole)
      balance = balance + p_tokens
      held_rate, held_capacity = min(p_held_rate, said_held), p_held_capacity
    end
  end
  local n = holders + weight + 1
  local demand = said_wanted < 0 and weight / n or min(1, said_wanted / rate)
  local plain = (plain_rate * 1.05 + max(0, -balance) / lease_us * 1e6) / rate
  local mean = (demands + demand) / (holders + weight)
  local many = mean > 0 and max(1, min(1000000, plain / mean)) or 1
  local everybody = holders + weight + many
  local level = (1 - content - plain) / (short + weight)
  if plain > many * level then level = (1 - content) / (short + weight + many) end
  level = max(level, 1 / everybody)
  local goal, own, is_content = demand, min(plain, many * level), demand <= level * weight
  if not is_content then
    goal = level * weight
  else
    local spare = 1 - content - demand - plain
    if short == 0 and spare > 0 then
      goal, own = demand + weight * spare / everybody, plain + many * spare / everybody
    end
  end
  local new_rate = min(goal, max(held_rate, 1 - own - rates))
  local least = need / whole
  local equal = max(least, 0.5 * weight / n)
  local new_capacity = min(equal + new_rate * max(0, 1 - n * equal / weight), max(held_capacity, 1 - least - capacities))
  if new_capacity < least * (1 - 1e-9) then new_rate, new_capacity = 0, 0 end

  -- Lend it: see lend and count_part. Debt that comes here is for the general case.
  local tokens, lent_rate, lent_capacity = 0, max(new_rate, held_rate), max(new_capacity, held_capacity)
  if new_capacity > held_capacity and balance > 0 then
    tokens = balance * min(1, (new_capacity - held_capacity) / (1 - capacities - held_capacity))
  end
  balance = balance - tokens
  if not (said_debt - (p_moved - said_moved) - lent_rate * rate * lease_us / 1e6 <= 0) then return nil end
  end_us = math.ceil((tau + lease_us + MARGIN_US) / GRAIN_US) * GRAIN_US
  p_content, p_short, p_demand = is_content and demand or 0, is_content and 0 or weight, demand
  if lent_capacity == 0 and n * least > weight then p_content, p_short, p_demand = 0, 0, 0 end
  local at = 1
  while at <= behind and sums[at] ~= end_us do at = at + 7 end
  if at > behind then
    sums[at], sums[at + 1], sums[at + 2], sums[at + 3] = end_us, lent_rate, lent_capacity, weight
    sums[at + 4], sums[at + 5], sums[at + 6] = p_content, p_short, p_demand
    behind = at + 6
  else
    sums[at + 1], sums[at + 2] = sums[at + 1] + lent_rate, sums[at + 2] + lent_capacity
    sums[at + 3], sums[at + 4] = sums[at + 3] + weight, sums[at + 4] + p_content
    sums[at + 5], sums[at + 6] = sums[at + 5] + p_short, sums[at + 6] + p_demand
  end

  -- Count what it did: see count_used.
  local new_requests = asked_requests - did_requests
  local new_admitted = max(0, new_requests - (asked_refused - did_refuse))
  local new_charge = (by_request == 1 and new_admitted or asked_charge - did_charge) * each
  requests, admitted = requests + new_requests, admitted + new_admitted
  refused = refused + max(0, said_refused - p_refused)
  work_charged = work_charged + new_charge
  seen_work, seen_requests = seen_work + new_charge, seen_requests + new_requests
  seen_admitted = seen_admitted + new_admitted
  local settled, squared, settles, missed, uncollected = unpack_struct('<ddddd', raw, BEHIND_ROOM + 1)
  settled, squared = settled + (asked_work - did_work) * each, squared + (asked_square - did_square) * each * each
  settles, missed = settles + (asked_settle - did_settle), missed + (asked_late - did_late)

  -- What the record keeps of it: see finish_bucket.
  local kept = 0
  rates, capacities, parts_until = 0, 0, 0
  for at = 1, behind, 7 do
    if sums[at + 3] > 0.5 then
      if kept ~= at - 1 then
        for field = 0, 6 do sums[kept + 1 + field] = sums[at + field] end
      end
      parts_until = max(parts_until, sums[kept + 1])
      rates, capacities = rates + sums[kept + 2], capacities + sums[kept + 3]
      kept = kept + 7
    end
  end
  parts_capacity = 1 - min(1, max(0, whole * (1 - capacities) / capacity))
  balance = min(balance, capacity * (1 - parts_capacity))

  local packed_row = pack_struct('<Bdddddddddddddddddddddddddd', 0, number, weight, asked_requests, asked_refused,
    asked_charge, asked_work, asked_square, asked_settle, asked_answer, asked_late, asked_seconds, end_us, new_rate,
    new_capacity, held_rate, held_capacity, tokens, p_moved, 0, 0, max(p_refused, said_refused), p_content, p_short,
    p_demand, left + tokens, tau)
  local left_us = max(0, end_us - tau)
  call('SET', KEYS[1], packed_row, 'PX', is_sent and 3600000 or math.ceil((left_us + ROW_KEPT_US) / 1000) + 1000)
  local index = KEYS[BEFORE + 2]
  redis.pcall('ZADD', index, now_us + left_us, ARGV[5])
  redis.pcall('ZREMRANGEBYSCORE', index, '-inf', now_us - ROW_KEPT_US)
  redis.pcall('PEXPIRE', index, 3600000)

  -- Write the bucket: see keep and write_records.
  local key, sampled, needed_s = KEYS[BEFORE + 1], (tonumber(raws[2] or 0) or 0) % EPOCHS, (capacity - balance) / rate
  if parts_until > updated + shift then needed_s = max(needed_s, LENT_TTL_S) end
  needed_s = now_us / 1e6 + (needed_s < TTL_MAX_S and max(needed_s, 0) + IDLE_TTL_S or TTL_MAX_S)
  local is_kept = kept_s >= needed_s and kept_s <= needed_s + 2 * KEPT_LONGER_S
  if not is_kept then kept_s = math.ceil(needed_s) + KEPT_LONGER_S end
  local packed = pack_struct('<BHddddddiI', LAYOUT, LENDS, updated, balance, requests, admitted, refused, work_charged,
      sampled, min(kept_s, KEPT_MAX_S))
    .. sub(raw, BEHIND_KEPT + 1, BEHIND_ROOM) .. pack_struct('<ddddd', settled, squared, settles, missed, uncollected)
    .. standing .. pack_struct('<ddddBdddddd', max(0, rates), parts_capacity, parts_until, shift, kept / 7, tau, plain_rate,
      plain_at, seen_work, seen_requests, seen_admitted)
    .. pack_struct('<' .. string.rep('ddddddd', kept / 7), unpack(sums, 1, kept))
  if is_kept then
    call('SET', key, packed, 'KEEPTTL')
  elseif is_sent then
    call('SET', key, packed, 'PX', math.ceil(kept_s * 1000 - now_us / 1000))
  else
    call('SET', key, packed, 'PXAT', kept_s .. '000')
  end
  if epoch ~= sampled then
    local length = redis.pcall('RPUSH', KEYS[3], key)
    if type(length) == 'number' then
      if length > TOUCHED_MAX then call('LTRIM', KEYS[3], -TOUCHED_MAX, -1) end
      call('EXPIRE', KEYS[3], IDLE_TTL_S)
    end
  end
  return pack_struct('<BdBdddddddddd', DONE, now_us, LENT, new_rate * rate, new_capacity * whole, tokens, new_rate, p_moved,
    balance, end_us, charge, new_capacity, 1)
end

if kind == RENEW and count == 1 and not is_general then
  local reply = renew_plain()
  if reply then return reply end
end

-- #include lib/record.lua
-- #include lib/call.lua

local max, min = math.max, math.min

local function only(status)
  return pack_struct('<BdB', DONE, now_us, status)
end

-- A lease is revoked: nothing more is lent, what is lent ends with the lease, what it owes may still come back.
if kind == REVOKE then
  if not raws[1] then return only(UNKNOWN) end
  if #raws[1] < ROW_HEAD_SIZE then return only(CORRUPT) end
  if string.byte(raws[1]) ~= 0 then return only(CLOSED) end
  call('SETRANGE', KEYS[1], '0', string.char(REVOKED))
  return only(RETURNED)
end

local params, records, terms, bounds = unpack_params(ARGV[2]), unpack_records(raws, BEFORE, count), {}, {}
for i = 1, count do
  local term = params[unpack_struct('<H', ARGV[3], 2 * i - 1)]
  terms[i] = term
  if records[i] == nil then return only(CORRUPT) end
  if not in_window(term, now_us) then return only(WINDOW) end
  if records[i] then
    advance(records[i], term, now_us)
  else
    records[i] = fresh_record(term, now_us)
  end
  bounds[i] = term.lend_bound * share_of(records[i], term, now_us)  -- of a divided limit, its share
end

-- The request, a row per bucket.
local used, held, wanted, debt, moved, work_weight, refused, by_request = {}, {}, {}, {}, {}, {}, {}, {}
for i = 1, USED do used[i], at = unpack_struct('<d', ARGV[4], at) end
for i = 1, count do
  held[i], wanted[i], debt[i], moved[i], work_weight[i], refused[i], by_request[i], at =
    unpack_struct('<ddddddd', ARGV[4], at)
end

-- The bucket's own callers: what they ask for, smoothed. What was refused is taken to cost as much as the rest.
local function follow_plain(record, term, book)
  local elapsed_us = book[BOOK_TAU] - book[BOOK_PLAIN_AT]
  if elapsed_us < PLAIN_MIN_US then return end
  local requests, admitted = record[REQUESTS] - book[BOOK_REQUESTS], record[ADMITTED] - book[BOOK_ADMITTED]
  local counts_requests = has(record[FLAGS], COUNTS_REQUESTS)
  local each = counts_requests and 1 or term.lend_need
  if admitted > 0 and not counts_requests then each = (record[WORK_CHARGED] - book[BOOK_WORK]) / admitted end
  local asked = requests * each / elapsed_us * 1e6
  book[BOOK_PLAIN] = book[BOOK_PLAIN] + elapsed_us / (elapsed_us + SMOOTH_US) * (asked - book[BOOK_PLAIN])
  book[BOOK_PLAIN_AT] = book[BOOK_TAU]
  book[BOOK_WORK], book[BOOK_REQUESTS], book[BOOK_ADMITTED] = record[WORK_CHARGED], record[REQUESTS], record[ADMITTED]
end

local function unpack_book(raw)
  local ends = {}
  local count_ends, tau, plain, plain_at, work, requests, admitted, from = unpack_struct('<Bdddddd', raw)
  for i = 1, count_ends do
    ends[i] = { unpack_struct('<ddddddd', raw, from) }
    from = from + SUMS_SIZE
  end
  return { tau, plain, plain_at, work, requests, admitted, ends }
end

local function pack_book(book)
  local ends = book[BOOK_ENDS]
  local packed = { pack_struct('<Bdddddd', #ends, unpack(book, BOOK_TAU, BOOK_ADMITTED)) }
  for i = 1, #ends do packed[i + 1] = pack_struct('<ddddddd', unpack(ends[i], 1, 7)) end
  return table.concat(packed)
end

-- The book of a bucket that was brought to now: what has ended goes. Own time never goes back.
local function open_book(record, term)
  local tau, book = record[UPDATED] + record[SHIFT], unpack_book(record[BOOK])
  if book[BOOK_TAU] == 0 then
    return { tau, 0, tau, record[WORK_CHARGED], record[REQUESTS], record[ADMITTED], {} }
  end
  if tau < book[BOOK_TAU] then
    record[SHIFT] = record[SHIFT] + (book[BOOK_TAU] - tau)
    tau = book[BOOK_TAU]
  end
  book[BOOK_TAU] = tau
  local ends = {}
  for _, sums in ipairs(book[BOOK_ENDS]) do
    if sums[1] > tau then ends[#ends + 1] = sums end
  end
  book[BOOK_ENDS] = ends
  follow_plain(record, term, book)
  return book
end

local books = {}
for i = 1, count do books[i] = open_book(records[i], terms[i]) end

-- The lease: closed, number, weight, what it did as far as that is counted, a part for each bucket.
local row_number, row_weight, is_closed, row_used, parts = nil, weight, 0, { 0, 0, 0, 0, 0, 0, 0, 0, 0 }, {}
if raws[1] then
  if #raws[1] ~= ROW_HEAD_SIZE + count * PART_SIZE then return only(CORRUPT) end
  local row_at
  is_closed, row_number, row_weight, row_at = unpack_struct('<Bdd', raws[1])
  for i = 1, USED do row_used[i], row_at = unpack_struct('<d', raws[1], row_at) end
  local is_known = false
  for i = 1, count do
    parts[i] = { unpack_struct('<ddddddddddddddd', raws[1], row_at) }
    row_at = row_at + PART_SIZE
    if books[i][BOOK_TAU] <= parts[i][END_US] + ROW_KEPT_US then is_known = true end
  end
  if not is_known then row_number = nil end
elseif call('EXISTS', KEYS[1]) ~= 0 then
  return only(CORRUPT)
end

local function answer(status)
  local rows = { only(status) }
  for i = 1, count do
    local record, part = records[i], parts[i]
    if record[FLAGS] % 2 == QUOTA then
      rows[i + 1] = pack_struct('<dddddddddd', 0, 0, part[P_TOKENS], 0, record[WINDOW_END], record[BALANCE],
        part[END_US], record[CHARGE], 0, 1)
    else
      local whole = record[CAPACITY] + bounds[i]
      rows[i + 1] = pack_struct('<dddddddddd', part[P_RATE] * record[RATE], part[P_CAPACITY] * whole, part[P_TOKENS],
        part[P_RATE], part[P_MOVED], record[BALANCE], part[END_US], record[CHARGE], part[P_CAPACITY],
        share_of(record, terms[i], now_us))
    end
    local shedding = record[SHEDDING]
    if shedding then
      if shedding[LENT_UNTIL] ~= 0 then
        rows[i + 1] = rows[i + 1] .. pack_struct('<dd', shedding[QUALITY], shedding[STATE])
          .. pack_struct('<dddddddd', unpack(shedding, SHED_SHARE, SHED_RATE + CLASSES - 1))
      else
        rows[i + 1] = rows[i + 1] .. pack_struct('<dddddddddd', 1, 0, 0, 0, 0, 0, 0, 0, 0, 0)
      end
      rows[i + 1] = rows[i + 1] .. pack_struct('<dddd', unpack(shedding, SHED_LIMIT, SHED_LIMIT + CLASSES - 1))
    end
  end
  return table.concat(rows)
end

if not row_number then
  if number ~= 1 or kind ~= RENEW then return only(UNKNOWN) end
  row_weight, row_used = weight, { 0, 0, 0, 0, 0, 0, 0, 0, 0 }
  for i = 1, count do parts[i] = { 0, 0, 0, 0, 0, 0, moved[i], 0, 0, 0, 0, 0, 0, 0, 0 } end
elseif number < row_number then
  return only(OUTDATED)
elseif is_closed == GIVEN_BACK or (is_closed == REVOKED and kind == RENEW) then
  return only(CLOSED)
elseif number == row_number then
  return answer(LENT)
end
for i = 1, USED do
  if used[i] < row_used[i] then used[i] = row_used[i] end
end

-- Count a part in the sums of its end.
local function count_part(book, part)
  local rate, capacity = max(part[P_RATE], part[P_HELD_RATE]), max(part[P_CAPACITY], part[P_HELD_CAPACITY])
  local ends = book[BOOK_ENDS]
  for i = 1, #ends do
    local sums = ends[i]
    if sums[1] == part[END_US] then
      sums[2], sums[3], sums[4] = sums[2] + rate, sums[3] + capacity, sums[4] + weight
      sums[5], sums[6], sums[7] = sums[5] + part[P_CONTENT], sums[6] + part[P_SHORT], sums[7] + part[P_DEMAND]
      return
    end
  end
  ends[#ends + 1] = { part[END_US], rate, capacity, weight, part[P_CONTENT], part[P_SHORT], part[P_DEMAND] }
end

-- Take a part out of the sums of its end; whether it was in them. A bucket that was forgotten has none.
local function take_out(book, part)
  if part[END_US] <= book[BOOK_TAU] then return false end
  local rate, capacity = max(part[P_RATE], part[P_HELD_RATE]), max(part[P_CAPACITY], part[P_HELD_CAPACITY])
  local ends = book[BOOK_ENDS]
  for i = 1, #ends do
    local sums = ends[i]
    if sums[1] == part[END_US] then
      sums[2], sums[3] = max(0, sums[2] - rate), max(0, sums[3] - capacity)
      sums[4], sums[5] = max(0, sums[4] - row_weight), max(0, sums[5] - part[P_CONTENT])
      sums[6], sums[7] = max(0, sums[6] - part[P_SHORT]), max(0, sums[7] - part[P_DEMAND])
      return true
    end
  end
  return false
end

-- Over all ends: rate, capacity, weight of the holders, demand of the content, weight of the short, demand.
local function total(book)
  local rate, capacity, holders, content, short, demand = 0, 0, 0, 0, 0, 0
  for _, sums in ipairs(book[BOOK_ENDS]) do
    rate, capacity, holders = rate + sums[2], capacity + sums[3], holders + sums[4]
    content, short, demand = content + sums[5], short + sums[6], demand + sums[7]
  end
  return rate, capacity, holders, content, short, demand
end

local function owe(record, amount)
  local taken_now = collectable(record, amount)
  record[BALANCE] = record[BALANCE] - taken_now
  record[UNCOLLECTED] = record[UNCOLLECTED] + (amount - taken_now)
end

-- Max-min: who wants less than an equal part gets it, the rest is divided; plain callers are as many as they are worth.
local function fair(holders, content, short, demands, demand, plain)
  local mean = (demands + demand) / (holders + weight)
  local many = mean > 0 and max(1, min(1000000, plain / mean)) or 1
  local everybody = holders + weight + many
  local level = (1 - content - plain) / (short + weight)
  if plain > many * level then level = (1 - content) / (short + weight + many) end
  level = max(level, 1 / everybody)
  if demand > level * weight then return level * weight, min(plain, many * level), false end
  local spare = 1 - content - demand - plain
  if short == 0 and spare > 0 then return demand + weight * spare / everybody, plain + many * spare / everybody, true end
  return demand, min(plain, many * level), true
end

-- The most that the holder of a live part can have left, whatever it says: what it was given, and the time.
local function left_at_most(i, is_taken)
  local record, part = records[i], parts[i]
  local elapsed_us, whole = books[i][BOOK_TAU] - part[P_AT], record[CAPACITY] + bounds[i]
  if is_taken then
    return min(part[P_LEVEL] + elapsed_us * part[P_RATE] * record[RATE] / 1e6, part[P_CAPACITY] * whole)
  end
  local before = part[P_LEVEL] - part[P_TOKENS]  -- that answer was never taken over
  return min(before + elapsed_us * part[P_HELD_RATE] * record[RATE] / 1e6, part[P_HELD_CAPACITY] * whole)
end

-- What a bucket would lend: held rate and capacity, demand, content, rate, capacity, crowded, left.
local function draft(i, held_rate, held_capacity, left)
  local record, term, book = records[i], terms[i], books[i]
  local rates, capacities, holders, content, short, demands = total(book)
  local whole, n = record[CAPACITY] + bounds[i], holders + weight + 1
  local demand = wanted[i] < 0 and weight / n or min(1, wanted[i] / record[RATE])
  local plain = (book[BOOK_PLAIN] * 1.05 + max(0, -record[BALANCE]) / term.lend_lease * 1e6) / record[RATE]
  local goal, own, is_content = fair(holders, content, short, demands, demand, plain)
  local rate = min(goal, max(held_rate, 1 - own - rates))
  local least = term.lend_need / whole
  local equal = max(least, 0.5 * weight / n)
  local capacity = min(equal + rate * max(0, 1 - n * equal / weight), max(held_capacity, 1 - least - capacities))
  if capacity < least * (1 - 1e-9) then rate, capacity = 0, 0 end
  return { held_rate, held_capacity, demand, is_content, rate, capacity, n * least > weight, left }
end

local function lease_end(i)
  return math.ceil((books[i][BOOK_TAU] + terms[i].lend_lease + MARGIN_US) / GRAIN_US) * GRAIN_US
end

-- Tokens go with the capacity; debt that the holder could not repay by its end comes here, once.
local function lend(i, plan)
  local record, book, part = records[i], books[i], parts[i]
  local held_rate, held_capacity, demand, is_content, rate, capacity, crowded, left = unpack(plan, 1, 8)
  local _, capacities = total(book)
  local tokens = 0
  if capacity > held_capacity and record[BALANCE] > 0 then
    local free = 1 - capacities - held_capacity
    tokens = record[BALANCE] * min(1, (capacity - held_capacity) / free)
  end
  record[BALANCE] = record[BALANCE] - tokens
  part[P_RATE], part[P_CAPACITY], part[P_TOKENS] = rate, capacity, tokens
  part[P_LEVEL], part[P_AT] = left + tokens, book[BOOK_TAU]
  part[P_GIVEN], part[P_PERIOD], part[P_HELD_RATE], part[P_HELD_CAPACITY] = 0, 0, held_rate, held_capacity
  part[END_US] = lease_end(i)
  part[P_CONTENT], part[P_SHORT], part[P_DEMAND] = is_content and demand or 0, is_content and 0 or weight, demand
  local lent_rate = max(rate, held_rate)
  if max(capacity, held_capacity) == 0 and crowded then part[P_CONTENT], part[P_SHORT], part[P_DEMAND] = 0, 0, 0 end
  local owed = max(0, debt[i] - (part[P_MOVED] - moved[i]) - lent_rate * record[RATE] * terms[i].lend_lease / 1e6)
  owe(record, owed)
  part[P_MOVED] = part[P_MOVED] + owed
  count_part(book, part)
end

-- A quota gets back what a holder does not keep, or is owed what it has spent beyond what it was given. What the quota could
-- not pay comes back to nobody.
local function set_right(record, part, given, kept)
  if kept > given then
    local unpaid = record[UNCOLLECTED]
    owe(record, kept - given)
    part[P_MOVED] = part[P_MOVED] + (record[UNCOLLECTED] - unpaid)
  else
    local forgiven = min(given - kept, part[P_MOVED])
    part[P_MOVED], record[UNCOLLECTED] = part[P_MOVED] - forgiven, record[UNCOLLECTED] - forgiven
    record[BALANCE] = record[BALANCE] + (given - kept - forgiven)
  end
end

-- F-L8: a quota lends for good; portions shrink with what is left, the last units go one by one.
local function portion(i)
  local record, book, part = records[i], books[i], parts[i]
  local spent, keeps, given = 0, 0, 0
  if moved[i] == record[WINDOW_END] then spent, keeps = debt[i], held[i] end
  if part[P_PERIOD] == record[WINDOW_END] then given = part[P_GIVEN] else part[P_MOVED] = 0 end
  keeps = min(keeps, max(0, given - spent))
  set_right(record, part, given, spent + keeps)
  local asked = max(0, wanted[i])
  local _, _, holders = total(book)
  local goal = min(asked * 1.5, (record[BALANCE] + keeps) / (2 * (holders + weight + 1)))
  if asked > 0 and goal < 1 then goal = 1 end
  local more = max(0, min(math.ceil(goal - keeps), math.floor(record[BALANCE])))
  record[BALANCE] = record[BALANCE] - more
  for field = P_RATE, P_HELD_CAPACITY do part[field] = 0 end
  part[P_CONTENT], part[P_SHORT], part[P_DEMAND] = 0, 0, 0
  part[P_TOKENS], part[P_GIVEN], part[P_PERIOD] = more, spent + keeps + more, record[WINDOW_END]
  part[END_US] = lease_end(i)
  count_part(book, part)
end

local function give_back(i, is_live)
  local record, part = records[i], parts[i]
  if record[FLAGS] % 2 == QUOTA then
    if part[P_PERIOD] == record[WINDOW_END] and moved[i] == record[WINDOW_END] then
      set_right(record, part, part[P_GIVEN], debt[i])
    end
    part[P_TOKENS], part[P_GIVEN] = 0, 0
  else
    if is_live and part[P_PERIOD] == 0 then
      local most = left_at_most(i, true)
      record[BALANCE] = record[BALANCE] + (taken == row_number and min(held[i], most) or part[P_TOKENS])
    end
    owe(record, max(0, debt[i] - (part[P_MOVED] - moved[i])))
    for field = P_RATE, P_TOKENS do part[field] = 0 end
    part[P_LEVEL] = 0
  end
  part[END_US] = min(part[END_US], books[i][BOOK_TAU])
end

-- What the holder did since the last request that was counted: no demand of plain callers.
local function count_used(i)
  local record, book, part, each = records[i], books[i], parts[i], work_weight[i]
  local requests = used[1] - row_used[1]
  local admitted = max(0, requests - (used[2] - row_used[2]))
  local charged = (by_request[i] == 1 and admitted or used[3] - row_used[3]) * each
  local settles, squared = used[6] - row_used[6], (used[5] - row_used[5]) * each
  if weighs(record[FLAGS]) then
    requests, admitted, settles = requests * each, admitted * each, settles * each
  else
    squared = squared * each
  end
  record[REQUESTS], record[ADMITTED] = record[REQUESTS] + requests, record[ADMITTED] + admitted
  record[REFUSED] = record[REFUSED] + max(0, refused[i] - part[P_REFUSED])
  record[WORK_CHARGED] = record[WORK_CHARGED] + charged
  record[WORK_SETTLED] = record[WORK_SETTLED] + (used[4] - row_used[4]) * each
  record[WORK_SQUARED], record[SETTLES] = record[WORK_SQUARED] + squared, record[SETTLES] + settles
  part[P_REFUSED] = max(part[P_REFUSED], refused[i])
  book[BOOK_WORK], book[BOOK_REQUESTS] = book[BOOK_WORK] + charged, book[BOOK_REQUESTS] + requests
  book[BOOK_ADMITTED] = book[BOOK_ADMITTED] + admitted
  record[MISSED] = record[MISSED] + (used[8] - row_used[8])
  local shedding = record[SHEDDING]
  if shedding then
    shedding[ASKED + DEFAULT_CLASS] = shedding[ASKED + DEFAULT_CLASS] + (used[1] - row_used[1])
    shedding[TIMED + DEFAULT_CLASS] = shedding[TIMED + DEFAULT_CLASS] + (used[7] - row_used[7])
    shedding[LATE + DEFAULT_CLASS] = shedding[LATE + DEFAULT_CLASS] + (used[8] - row_used[8])
    shedding[SECONDS] = shedding[SECONDS] + (used[9] - row_used[9])
  end
end

-- What the record keeps of all this: how much of its rate and its capacity is away, and until when.
local function finish_bucket(i)
  local record, book, ends, until_us = records[i], books[i], {}, 0
  for _, sums in ipairs(book[BOOK_ENDS]) do
    if sums[4] > 0.5 then  -- else nobody is left in it, and the rest is rounding
      ends[#ends + 1] = sums
      until_us = max(until_us, sums[1])
    end
  end
  book[BOOK_ENDS] = ends
  local rates, capacities = total(book)
  local own = (record[CAPACITY] + bounds[i]) * (1 - capacities) / record[CAPACITY]
  record[PARTS_RATE], record[PARTS_CAPACITY] = max(0, rates), 1 - min(1, max(0, own))
  record[PARTS_UNTIL], record[BOOK] = until_us, pack_book(book)
  record[BALANCE] = min(record[BALANCE], free_capacity(record))
end

local drafts, lends = {}, true
for i = 1, count do
  local part, record, held_rate, held_capacity, left = parts[i], records[i], 0, 0, 0
  local is_live = row_number and take_out(books[i], part)
  if kind ~= RENEW then
    give_back(i, is_live)
  elseif record[FLAGS] % 2 ~= QUOTA then
    if is_live and part[P_PERIOD] == 0 then
      left = left_at_most(i, taken == row_number)
      if taken == row_number then
        held_rate, held_capacity = min(part[P_RATE], held[i]), part[P_CAPACITY]
      else
        record[BALANCE] = record[BALANCE] + part[P_TOKENS]  -- that answer is never taken over now
        held_rate, held_capacity = min(part[P_HELD_RATE], held[i]), part[P_HELD_CAPACITY]
      end
    end
    drafts[i] = draft(i, held_rate, held_capacity, left)
    if drafts[i][6] == 0 then lends = false end
  end
end
local touched, left_us = {}, 0  -- until the last part ends, by the buckets' own time, which may be far from the server's
for i = 1, count do
  local plan = drafts[i]
  if plan then
    if not lends then plan[5], plan[6] = 0, 0 end
    lend(i, plan)
  elseif kind == RENEW then
    portion(i)
  end
  count_used(i)
  finish_bucket(i)
  touched[i] = true
  left_us = max(left_us, parts[i][END_US] - books[i][BOOK_TAU])
end

local packed = { pack_struct('<Bdd', kind == RENEW and 0 or GIVEN_BACK, number, weight) }
for i = 1, USED do packed[i + 1] = pack_struct('<d', used[i]) end
for i = 1, count do packed[#packed + 1] = pack_struct('<ddddddddddddddd', unpack(parts[i], 1, P_AT)) end
local kept_ms = math.ceil((left_us + ROW_KEPT_US) / 1000) + 1000
if is_sent then kept_ms = 3600000 end  -- a time that a test sends does not pass here
call('SET', KEYS[1], table.concat(packed), 'PX', kept_ms)
local index = KEYS[BEFORE + count + 1]
if kind == RENEW then
  redis.pcall('ZADD', index, now_us + left_us, ARGV[5])
  redis.pcall('ZREMRANGEBYSCORE', index, '-inf', now_us - ROW_KEPT_US)
  redis.pcall('PEXPIRE', index, 3600000)
else
  redis.pcall('ZREM', index, ARGV[5])
end
write_records(raws, records, touched, now_us, is_sent)
return answer(kind == RENEW and LENT or RETURNED)
