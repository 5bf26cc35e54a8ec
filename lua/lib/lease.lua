--[[ lease: who may steer a slot. The value is a fence number (float64) followed by the owner's name; together they are
the token that every call of the controller brings. Equal to the byte means: this owner, by this taking of the lease.
Whoever was paused while another took over brings an old token, and changes nothing (F-P7). ]]

local FENCE_SIZE = 8
local DONE, LOST = 1, 3  -- first byte of a reply

-- What holds the lease now; nil: nobody. Something that is not ours holds it for ever, and stays untouched (F-S11).
local function read_lease(key)
  local token = redis.pcall('GET', key)
  if not token then return nil end
  return type(token) == 'string' and token or ''
end
