#!lua
--[[ lease: take, keep or give back the right to steer a slot.
KEYS[1]   lease         string, fence number and owner, see lib/lease.lua; gone when it ends
KEYS[2]   fence         string, how often the slot was taken: the last fence number
ARGV[1]   owner         name of the controller, one of its own for each process
ARGV[2]   ttl_ms        how long the lease is to last; 0 = give it back
RETURNS   the fence number of the lease that the owner holds now, 0 if it holds none; milliseconds that the lease,
          whoever has it, will last
HOLDS     one owner at a time; each taking has a higher fence number; nobody gives back what is another's ]]

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
