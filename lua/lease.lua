#!lua
--[[ lease: take, renew or give back the right to steer a slot.
KEYS[1]   lease         string, fence number and owner, see lib/lease.lua; expires with the lease
KEYS[2]   fence         string, how often the slot was taken: the last fence number
ARGV[1]   owner         name of the controller process, unique
ARGV[2]   ttl_ms        duration of the lease from now on; 0 = give it back
RETURNS   the fence number of the owner's lease, 0 if it holds none; milliseconds left of the lease, whichever owner
          holds it
HOLDS     one owner at a time; each new owner has a higher fence number; only the owner can give the lease back ]]

-- #include lib/lease.lua

local owner, ttl_ms = ARGV[1], tonumber(ARGV[2])
local token = read_lease(KEYS[1])
local ours = token ~= nil and #token > FENCE_SIZE and string.sub(token, FENCE_SIZE + 1) == owner

if ttl_ms == 0 then
  if ours then redis.call('DEL', KEYS[1]) end
  return { 0, 0 }
end
if ours then
  redis.call('PEXPIRE', KEYS[1], ttl_ms)
  return { struct.unpack('<d', token), ttl_ms }
end
if token then return { 0, redis.call('PTTL', KEYS[1]) } end
local fence = redis.call('INCR', KEYS[2])
redis.call('SET', KEYS[1], struct.pack('<d', fence) .. owner, 'PX', ttl_ms)
return { fence, ttl_ms }
