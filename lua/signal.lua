#!lua
--[[ signal: keep what one source reports of its load, beside what the others last reported.
A script, because many sources share one string, which the controller reads with all others in one MGET; and because
reports bear the server's time, so that nodes' clocks don't matter (F-T4).
KEYS[1]   signals       string, a row per source: its name's digest, reported_us, size, the signals; oldest report first
ARGV[1]   now_us        float64; 0 = server clock; only tests send one
ARGV[2]   source        digest of the reporting source's name
ARGV[3]   signals       names and loads as limiter/store/layout.py packs them; nothing here looks into them
RETURNS   how many sources are known now
HOLDS     one row per source, the newest; none older than SIGNAL_TTL_MS; at most SOURCES_MAX, the newest; what cannot be
          read is replaced: reports are worth nothing a minute later ]]

local SIGNAL_TTL_MS, SOURCES_MAX = 60000, 64
local SOURCE_SIZE, ROW_HEAD_SIZE = 8, 18  -- a row's head: source, float64 of microseconds, uint16 of the size

local now_us = struct.unpack('<d', ARGV[1])
if now_us == 0 then
  local time = redis.call('TIME')
  now_us = time[1] * 1000000 + time[2]
end

-- The rows of other sources that are neither too old nor from a time that has not come.
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
