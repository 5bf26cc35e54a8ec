--[[ call: what every batched script does around its operations: know the time, answer a repeat, refuse a call that
comes too late, read each bucket once, write each touched one once, and list it for the controller.
A call that was sent again finds its first reply, so nothing is debited twice (F-S4). The reply is kept for
REPLY_TTL_MS; a call carries an expiry well before that, so a copy that the network held back for longer than its
reply lives does nothing either. ]]

local REPLY_TTL_MS = 10000
local TOUCHED_MAX = 65536   -- without a controller the list of touched buckets grows no further, and goes in time
local DONE, EXPIRED = 1, 2  -- first byte of a reply

local function begin(reply_key, head)
  local reply = call('GET', reply_key)
  if reply then return reply end
  local now_us, expires_us, bucket_count = unpack_struct('<ddH', head)
  if now_us == 0 then
    local time = call('TIME')
    now_us = time[1] * 1000000 + time[2]
  end
  -- An expiry beyond the life of the reply would be none: whoever set it has the wrong idea of our time.
  if expires_us > 0 and (now_us > expires_us or expires_us > now_us + REPLY_TTL_MS * 1000) then
    return pack_struct('<Bd', EXPIRED, now_us)
  end
  return nil, now_us, bucket_count
end

local function begin_reply(now_us)
  return pack_struct('<Bd', DONE, now_us)
end

local function finish(reply_key, answers)
  local reply = table.concat(answers)
  call('SET', reply_key, reply, 'PX', REPLY_TTL_MS)
  return reply
end

-- Q5: the least slack of the epoch before is kept beside that of this one: a controller that reads a bucket just after
-- it was listed anew finds both. slacks[i] is the least that this call has seen in bucket i.
local function keep_slack(shedding, is_listed, slack)
  if is_listed then shedding[SLACK_BEFORE], shedding[SLACK_MIN] = shedding[SLACK_MIN], math.huge end
  if slack and slack < shedding[SLACK_MIN] then shedding[SLACK_MIN] = slack end
end

-- touched[i] is true for each bucket that an operation changed. What the controller keeps beside the buckets must
-- not stand in their way: were it damaged, the buckets would still be written and the reply still be kept.
local function write_records(records, touched, first, now_us, slacks)
  local sampling = redis.pcall('GET', KEYS[2])
  local epoch, listed = type(sampling) == 'string' and tonumber(sampling) or 0, {}
  for i in pairs(touched) do
    local record, key = records[i], KEYS[first + i - 1]
    local is_listed = record[EPOCH] ~= epoch
    if is_listed then
      record[EPOCH] = epoch
      listed[#listed + 1] = key
    end
    if record[SHEDDING] then keep_slack(record[SHEDDING], is_listed, slacks and slacks[i]) end
    call('SET', key, pack_record(record), 'PX', ttl_ms(record, now_us))
  end
  if #listed == 0 then return end
  local length = redis.pcall('RPUSH', KEYS[3], unpack(listed))
  if type(length) ~= 'number' then return end
  if length > TOUCHED_MAX then call('LTRIM', KEYS[3], -TOUCHED_MAX, -1) end
  call('PEXPIRE', KEYS[3], IDLE_TTL_MS)
end
