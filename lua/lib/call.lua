--[[ call: what a batched script does last: write each touched bucket once, list it for the controller, and keep the reply
(see lib/begin.lua). ]]

local TOUCHED_MAX = 65536   -- without a controller the list of touched buckets grows no further, and goes in time
local EPOCHS = 2147483648  -- the number of an epoch is kept as int32

local function begin_reply(now_us)
  return pack_struct('<Bd', DONE, now_us)
end

local function finish(reply_key, answers)
  local reply = table.concat(answers)
  call('SET', reply_key, reply, 'PX', REPLY_TTL_MS)
  return reply
end

-- Q5: the least slack of the epoch before is kept beside that of this one: a controller that reads a bucket just after
-- it was listed again finds both. slacks[i] is the least that this call has seen in bucket i.
local function keep_slack(shedding, is_listed, slack)
  if is_listed then shedding[SLACK_BEFORE], shedding[SLACK_MIN] = shedding[SLACK_MIN], math.huge end
  if slack and slack < shedding[SLACK_MIN] then shedding[SLACK_MIN] = slack end
end

-- touched[i] is true for each bucket that an operation changed. What the controller keeps beside the buckets must
-- not stand in their way: were it damaged, the buckets would still be written and the reply still be kept.
local function write_records(raws, records, touched, now_us, is_sent, slacks)
  local epoch, listed = (tonumber(raws[2] or 0) or 0) % EPOCHS, {}
  for i in pairs(touched) do
    local record, key = records[i], KEYS[BEFORE + i]
    local is_listed = record[EPOCH] ~= epoch
    if is_listed then
      record[EPOCH] = epoch
      listed[#listed + 1] = key
    end
    if record[SHEDDING] then keep_slack(record[SHEDDING], is_listed, slacks and slacks[i]) end
    write_record(key, raws[BEFORE + i], record, now_us, is_sent)
  end
  if #listed == 0 then return end
  local length = redis.pcall('RPUSH', KEYS[3], unpack(listed))
  if type(length) ~= 'number' then return end
  if length > TOUCHED_MAX then call('LTRIM', KEYS[3], -TOUCHED_MAX, -1) end
  call('EXPIRE', KEYS[3], IDLE_TTL_S)
end
