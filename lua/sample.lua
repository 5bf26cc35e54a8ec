#!lua
--[[ sample: take the names of buckets that changed since they were last taken, and renew the lease.
Their records are read separately: their counters only grow, so reading one twice, or late, loses nothing.
KEYS[1]   lease         string, fence number and owner, see lib/lease.lua
KEYS[2]   sampling      string, number of the sampling epoch
KEYS[3]   touched       list of the buckets changed since the last sampling
ARGV[1]   token         fence number and owner
ARGV[2]   ttl_ms        duration of the lease from now on
ARGV[3]   count         names to take at most
RETURNS   done or lost and now_us in one string, then the keys of the buckets; the same one may come twice
HOLDS     a former owner takes nothing; a bucket that changes after this call is listed again ]]

-- #include lib/lease.lua

local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
if read_lease(KEYS[1]) ~= ARGV[1] then return { struct.pack('<Bd', LOST, now_us) } end
redis.call('PEXPIRE', KEYS[1], ARGV[2])

-- A damaged list counts as empty.
local names = redis.pcall('LPOP', KEYS[3], ARGV[3])
if not names or names.err then names = {} end
-- A new epoch even if names are left: a bucket that was taken and changes again must be listed again.
if #names > 0 then redis.pcall('INCR', KEYS[2]) end
table.insert(names, 1, struct.pack('<Bd', DONE, now_us))
return names
