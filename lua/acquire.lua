#!lua
--[[ acquire: admit or refuse a batch of requests, each over all its buckets or none (P5).
KEYS[1]   reply         string, this call's reply, kept so that a repeat debits nothing
KEYS[2]   sampling      string, number of the sampling epoch, moved by the controller
KEYS[3]   touched       list of the buckets changed since the last sampling
KEYS[4..] buckets       string records, see lib/record.lua; after them the idempotency keys that operations name
ARGV[1]   head          now_us (0 = server clock; only tests send one), expires_us (0 = never), number of buckets
ARGV[2]   params        rows of policy parameters, see lib/record.lua
ARGV[3]   terms         for each bucket the number of its row in params
ARGV[4]   operations    flags, buckets, requests; a row per bucket; an idempotency key's number, fingerprint and memo
RETURNS   one string: done or expired, now_us, then for each operation its status and a row per bucket: verdict,
          balance, charge, rate, capacity; limiter/store/layout.py reads it
HOLDS     a repeated call changes nothing; a refusal spends nothing; balance <= capacity; a debit stops at -debt_max;
          each bucket is read once and written once; what is not ours is left as it is ]]

-- #include lib/record.lua
-- #include lib/call.lua

local FIRST = 4
local OP_REFUSED, OP_GRANTED, OP_CORRUPT, OP_WINDOW, OP_CONFLICT, OP_REPLAYED = 0, 1, 2, 3, 4, 5
local PASSED, DEBITED, BLOCKED = 0, 1, 2
local LEASE, DRY_RUN, IDEMPOTENT = 1, 2, 4
local IDEMPOTENCY_TTL_MS = 60000
local FINGERPRINT_SIZE, KEPT_SIZE, ANSWER_ROW_SIZE = 16, 29, 33

local reply, now_us, bucket_count = begin(KEYS[1], ARGV[1])
if reply then return reply end

local params = unpack_params(ARGV[2])
local records = read_records(KEYS, FIRST, bucket_count)
local terms, unusable, touched = {}, {}, {}
for i = 1, bucket_count do
  local term, record = params[unpack_struct('<H', ARGV[3], 2 * i - 1)], records[i]
  terms[i] = term
  if record == nil then
    unusable[i] = OP_CORRUPT
  elseif not in_window(term, now_us) then
    unusable[i] = OP_WINDOW
  elseif record then
    advance(record, term, now_us)
  else
    records[i] = fresh_record(term, now_us)
  end
end

-- The operation at hand, a slot per bucket: reused, because a table per operation costs more than the decision.
local index, learned, minimum, charge, verdict = {}, {}, {}, {}, {}

-- W3. What is taken must be within the debt bound, or a minimum below it would be no limit at all. A quota is absolute
-- (P4): it has to cover the charge as well. A lease (P9) takes only the share of what it wants that every bucket can
-- give while keeping its minimum.
local function judge(count, requests, leased)
  local granted, share = true, 1
  for i = 1, count do
    local record, term = records[index[i]], terms[index[i]]
    local balance, need, want = record[BALANCE], minimum[i], charge[i]
    if term.counts_requests then
      want = requests
    elseif learned[i] == 1 and record[CHARGE] > 0 then
      want = record[CHARGE]
      charge[i] = want
    end
    local passed
    if leased then
      local available = balance - need
      passed = available > 0
      if passed and want * share > available and not term.shadow then share = available / want end
    else
      local cover = term.quota and want or math.min(want - record[DEBT_MAX], record[CAPACITY])
      if cover > need then need = cover end
      passed = balance >= need
    end
    verdict[i] = passed and PASSED or BLOCKED
    if not (passed or term.shadow) then granted = false end
  end
  return granted, share
end

-- Debit every bucket of a granted operation; one that only watches (P11) takes part as long as it would admit.
local function commit(count, requests, granted, share)
  for i = 1, count do
    local record, term = records[index[i]], terms[index[i]]
    touched[index[i]] = true
    record[REQUESTS] = record[REQUESTS] + requests
    if verdict[i] == BLOCKED then
      record[REFUSED] = record[REFUSED] + requests
    elseif granted then
      local taken = (term.counts_requests and requests or charge[i]) * share
      if share < 1 and taken > record[BALANCE] - minimum[i] then taken = record[BALANCE] - minimum[i] end
      taken = collectable(record, taken)
      record[BALANCE] = record[BALANCE] - taken
      record[ADMITTED] = record[ADMITTED] + requests * share
      record[WORK_CHARGED] = record[WORK_CHARGED] + (term.counts_requests and charge[i] * share or taken)
      verdict[i], charge[i] = DEBITED, taken
    end
  end
end

local function answer(count, status)
  local record = records[index[1]]
  local rows = pack_struct('<BBdddd', status, verdict[1], record[BALANCE], charge[1], record[RATE], record[CAPACITY])
  for i = 2, count do
    record = records[index[i]]
    rows = rows .. pack_struct('<Bdddd', verdict[i], record[BALANCE], charge[i], record[RATE], record[CAPACITY])
  end
  return rows
end

local function decide(flags, count, requests)
  local granted, share = judge(count, requests, has(flags, LEASE))
  if not has(flags, DRY_RUN) then commit(count, requests, granted, share) end
  return answer(count, granted and OP_GRANTED or OP_REFUSED)
end

-- A decision that was kept: layout, fingerprint, now_us, memo, then the answer. nil: none yet; false: not ours (S11).
local decided = {}
local function recall(key)
  local kept = decided[key] or redis.pcall('GET', key)
  if not kept then return nil end
  if type(kept) == 'table' or #kept < KEPT_SIZE or string.byte(kept) ~= LAYOUT then return false end
  local _, fingerprint, _, memo_size = unpack_struct('<Bc16dI', kept)
  local answer_size = #kept - KEPT_SIZE - memo_size
  if answer_size < 1 or (answer_size - 1) % ANSWER_ROW_SIZE ~= 0 then return false end
  return fingerprint, string.sub(kept, 2 + FINGERPRINT_SIZE)
end

-- R7, R8: the first decision under an idempotency key stands; the memo lets any node rebuild the whole answer.
local function decide_once(key, fingerprint, memo, flags, count, requests)
  local first_fingerprint, first = recall(key)
  if first_fingerprint == false then return string.char(OP_CORRUPT) end
  if first_fingerprint == nil then
    local decision = decide(flags, count, requests)
    decided[key] = pack_struct('<Bc16dI', LAYOUT, fingerprint, now_us, #memo) .. memo .. decision
    return decision
  end
  if first_fingerprint ~= fingerprint then return string.char(OP_CONFLICT) end
  return pack_struct('<BI', OP_REPLAYED, #first) .. first
end

local operations, at, answers = ARGV[4], 1, { begin_reply(now_us) }
local size = #operations
while at <= size do
  local flags, count, requests, status, key, fingerprint, memo
  flags, count, requests, index[1], learned[1], minimum[1], charge[1], at = unpack_struct('<BBdHBdd', operations, at)
  status = unusable[index[1]]
  for i = 2, count do
    index[i], learned[i], minimum[i], charge[i], at = unpack_struct('<HBdd', operations, at)
    status = status or unusable[index[i]]
  end
  if flags >= IDEMPOTENT then
    key, fingerprint, memo, at = unpack_struct('<Hc16Ic0', operations, at)
    key = KEYS[FIRST + bucket_count + key - 1]
  end
  if status then
    answers[#answers + 1] = string.char(status)
  elseif key then
    answers[#answers + 1] = decide_once(key, fingerprint, memo, flags, count, requests)
  else
    answers[#answers + 1] = decide(flags, count, requests)
  end
end

write_records(records, touched, FIRST, now_us)
for key, decision in pairs(decided) do call('SET', key, decision, 'PX', IDEMPOTENCY_TTL_MS) end
return finish(KEYS[1], answers)
