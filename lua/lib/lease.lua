--[[ lease: who may steer a slot. The value is a fence number (float64) followed by the owner's name; together they are
the token that every call of the controller brings. Equal bytes mean the same owner and the same ownership.
An owner that was paused while another took over presents an old token, and changes nothing (F-P7). ]]

local FENCE_SIZE = 8
local DONE, LOST = 1, 3  -- first byte of a reply

-- The token that is stored; nil: nobody owns the slot. Bytes of an unknown form count as an owner and are kept (F-S11).
local function read_lease(key)
  local token = redis.pcall('GET', key)
  if not token then return nil end
  return type(token) == 'string' and token or ''
end
