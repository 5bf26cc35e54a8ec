#!lua
--[[ signal: store the load that one source reports, beside the last reports of the others.
It is a script because many sources share one string, which the controller reads with all others in one MGET, and
because reports carry the server's time, so that nodes' clocks don't matter (F-T4).
KEYS[1]   signals       string, a row per source: its name's digest, reported_us, size, the signals; oldest report first
ARGV[1]   now_us        float64; 0 = server clock; only tests send one
ARGV[2]   source        digest of the reporting source's name
ARGV[3]   signals       names and loads as limiter/store/call_layout.py packs them; not read here
RETURNS   the number of sources stored now
HOLDS     one row per source, the newest; none older than SIGNAL_TTL_MS; at most SOURCES_MAX, the newest; an unreadable
          value is replaced: reports are worthless after a minute ]]

local SIGNAL_TTL_MS, SOURCES_MAX = 60000, 64
local SOURCE_SIZE, ROW_HEAD_SIZE = 8, 18  -- a row's head: source, float64 of microseconds, uint16 of the size

local now_us = struct.unpack('<d', ARGV[1])
if now_us == 0 then
  local time = redis.call('TIME')
  now_us = time[1] * 1000000 + time[2]
end

-- Returns the rows of other sources that are neither too old nor from the future.
local function others(kept)
  local rows, at, size = {}, 1, #kept
  while at <= size do
    if size - at + 1 < ROW_HEAD_SIZE then return {} end
    local source, reported_us, row_size = struct.unpack('<c8dH', kept, at)
    local last = at + ROW_HEAD_SIZE + row_size - 1
    if last > size then return {} end
    if source ~= ARGV[2] and reported_us <= now_us and reported_us > now_us - SIGNAL_TTL_MS * 1000 then
      rows[#rows + 1] = string.sub(kept, at, last)
    end
    at = last + 1
  end
  return rows
end

assert(#ARGV[2] == SOURCE_SIZE)
local kept = redis.pcall('GET', KEYS[1])
local rows = others(type(kept) == 'string' and kept or '')
while #rows >= SOURCES_MAX do table.remove(rows, 1) end
rows[#rows + 1] = struct.pack('<c8dH', ARGV[2], now_us, #ARGV[3]) .. ARGV[3]
redis.call('SET', KEYS[1], table.concat(rows), 'PX', SIGNAL_TTL_MS)
return #rows
