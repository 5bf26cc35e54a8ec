--[[ begin: what a batched script does first, with now_us and expires_us from its head and with read_count, the number of
keys that it needs read: read them at once, answer a repeat, know the time, refuse a call that comes too late. No
functions, as each that is defined costs every call.
A call that was sent again finds its first reply, so nothing is debited twice (F-S4). The reply is kept for
REPLY_TTL_MS; a call carries an expiry well before that, so a copy that the network held back for longer than its
reply lives does nothing either. ]]

local REPLY_TTL_MS = 10000
local DONE, EXPIRED = 1, 2  -- first byte of a reply

local call, pack_struct, unpack_struct = redis.call, struct.pack, struct.unpack
local raws = call('MGET', unpack(KEYS, 1, read_count))  -- false for what is missing, and for what is no string
if raws[1] then return raws[1] end
local is_sent = now_us ~= 0  -- by a test; the server's clock is another
local is_general = now_us < 0  -- and it wants the general case, whatever is asked
if is_general then
  now_us = -now_us
elseif not is_sent then
  local time = call('TIME')
  now_us = time[1] * 1000000 + time[2]
end
-- An expiry beyond the life of the reply would not protect: its sender does not know the server's time.
if expires_us > 0 and (now_us > expires_us or expires_us > now_us + REPLY_TTL_MS * 1000) then
  return pack_struct('<Bd', EXPIRED, now_us)
end
