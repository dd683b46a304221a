-- What every script of a partition shares (it is put before each of them): the keys, and the one function that decides
-- whether a lane is open.
--
-- KEYS[1]  the partition's name, `<prefix>{p0}:`. All keys below begin with it and so live in one slot.
-- ARGV[1]  the script's arguments, a msgpack array
-- Answers are msgpack, too; nil (false here) means "not done yet: call again".
--
--   items       hash    task id → record {device or '', lane key, due ms, type, state, crashes, owner, lease, told or ''}
--   ids         zset    all task ids, in order (every score is 0)
--   delayed     zset    task id by due ms
--   lane:<d>    zset    what waits in the lane of device d, in order of its keys
--   lanes       zset    devices whose lane has waiting tasks, in order
--   heads       hash    lane → its entry among the open ones as '<type>\0<member>', or '' while it is closed
--   open:<t>    zset    heads of type t of the lanes that may be served, in order
--   types       set     types that were ever open
--   out         hash    device → its task that is leased
--   leased:<o>  set     task ids that owner o has in hand
--   owners      zset    owner by the ms until which its leases hold
--   counts      hash    first character of the lane key (the priority) → how many wait
--   locks       hash    device → 'until=<ms> since=<ms> task=<task id> value=<value>'; anything else was put there by
--                       hand: all of it is the value, and it has no end
--   lock_names  zset    devices with a lock, in order; lock_ends: the same by the ms until which it holds
--   fences      hash    device → 'fence ms': the fence of its last execution that was closed, and when that was said
--   epoch       string  there once the locks were restored (B2)
--   bell        channel rings when a sleeping take must look again
--
-- A task without a device is a lane of its own, '~<task id>', and has no lane:<d>.
local at = KEYS[1]
local args = cmsgpack.unpack(ARGV[1])
local call, pack = redis.call, cmsgpack.pack
local ITEMS, IDS, WAITING_LATER, LANES, HEADS, OUT = at .. 'items', at .. 'ids', at .. 'delayed', at .. 'lanes', at .. 'heads', at .. 'out'
local LOCKS, LOCK_NAMES, LOCK_ENDS, TYPES = at .. 'locks', at .. 'lock_names', at .. 'lock_ends', at .. 'types'
local DEVICE, KEY, DUE, TYPE, STATE, CRASHES, OWNER, LEASE, TOLD = 1, 2, 3, 4, 5, 6, 7, 8, 9
local DELAYED, WAITING, LEASED = 0, 1, 2
local PROMOTE = 1000 -- delayed items that one script makes waiting: some 10 ms
local FENCES, FENCE_HOLDS = at .. 'fences', 3600000 -- ms: far less than any clean-up waits before it removes lower fences
local UUID7 = '^%x%x%x%x%x%x%x%x%-%x%x%x%x%-7%x%x%x%-[89ab]%x%x%x%-%x%x%x%x%x%x%x%x%x%x%x%x$'

local records = {} -- as read or written by this script; false: there is none
local counted = {} -- changes of `counts`
local looked = {} -- lanes to look at before the script ends, each once
local before = {} -- type → how many lanes of it were open when this script first touched them
local ring = false

local function record(id)
  local found = records[id]
  if found == nil then
    local packed = call('HGET', ITEMS, id)
    found = packed and cmsgpack.unpack(packed)
    records[id] = found
  end
  return found
end

local function keep(id, item)
  records[id] = item
  call('HSET', ITEMS, id, pack(item))
end

local function lane_of(id, device)
  return device ~= '' and device or '~' .. id
end

-- The usual lane key ends with the task's id, and is the member; a key of another make gets the id behind a zero byte.
local function member_of(id, item)
  local key = item[KEY]
  if #id == 36 and string.sub(key, -36) == id then return key end
  return key .. '\0' .. id
end

local function id_of(member)
  local zero = string.find(member, '\0', 1, true)
  return zero and string.sub(member, zero + 1) or string.sub(member, -36)
end

local function look_at(lane)
  if not looked[lane] then
    looked[lane] = true
    looked[#looked + 1] = lane
  end
end

local function count(item, change)
  local rank = string.sub(item[KEY], 1, 1)
  counted[rank] = (counted[rank] or 0) + change
end

-- Takes the item out of where it stands; its record is the caller's to change.
local function withdraw(id, item)
  local device = item[DEVICE]
  if item[STATE] == DELAYED then
    call('ZREM', WAITING_LATER, id)
  elseif item[STATE] == WAITING then
    if device ~= '' then call('ZREM', at .. 'lane:' .. device, member_of(id, item)) end
    count(item, -1)
  else
    call('SREM', at .. 'leased:' .. item[OWNER], id)
    if device ~= '' and call('HGET', OUT, device) == id then call('HDEL', OUT, device) end
  end
  look_at(lane_of(id, device))
end

local function wait_in_lane(id, item)
  item[STATE], item[OWNER], item[LEASE] = WAITING, '', ''
  keep(id, item)
  if item[DEVICE] ~= '' then call('ZADD', at .. 'lane:' .. item[DEVICE], 0, member_of(id, item)) end
  count(item, 1)
  look_at(lane_of(id, item[DEVICE]))
end

local function drop(id, item)
  withdraw(id, item)
  records[id] = false
  call('HDEL', ITEMS, id)
  call('ZREM', IDS, id)
end

local function give_back(id, item)
  withdraw(id, item)
  wait_in_lane(id, item)
end

-- value, task id, since, until; nil if there is none in force. since and until are nil for one that was set by hand.
local function lock_of(device, now)
  local text = call('HGET', LOCKS, device)
  if not text then return nil end
  local ends, since, task, value = string.match(text, '^until=(%d+) since=(%d+) task=(%S*) value=(.*)$')
  if not ends then return text end
  if tonumber(ends) <= now then return nil end
  return value, task, tonumber(since), tonumber(ends)
end

local function set_lock(device, claim, since)
  call('HSET', LOCKS, device, string.format('until=%.0f since=%.0f task=%s value=%s', claim[4], since, claim[3], claim[2]))
  call('ZADD', LOCK_NAMES, 0, device)
  call('ZADD', LOCK_ENDS, claim[4], device)
end

-- A hint. One that is too old could be lower than a fence whose row is gone, and nothing would refuse the next.
local function last_fence(device, now)
  local fence, at_ms = string.match(call('HGET', FENCES, device) or '', '^(%d+) (%d+)$')
  return fence and now - tonumber(at_ms) < FENCE_HOLDS and tonumber(fence) or 0
end

local function is_ours(value)
  return string.find(value, UUID7) ~= nil and not string.find(value, '%u')
end

local function is_closed(device, now)
  local out = call('HGET', OUT, device)
  if out then
    local item = record(out)
    if item and item[STATE] == LEASED and item[DEVICE] == device then return true end
    call('HDEL', OUT, device)
  end
  local value = lock_of(device, now)
  return value ~= nil and is_ours(value)
end

local function head_of(lane)
  if string.sub(lane, 1, 1) ~= '~' then return call('ZRANGE', at .. 'lane:' .. lane, 0, 0)[1] end
  local id = string.sub(lane, 2)
  local item = record(id)
  return item and item[STATE] == WAITING and member_of(id, item)
end

local function open_lanes(type)
  local key = at .. 'open:' .. type
  if not before[type] then before[type] = call('ZCARD', key) end
  return key
end

local function enter(entry)
  local zero = string.find(entry, '\0', 1, true)
  local type = string.sub(entry, 1, zero - 1)
  if call('ZADD', open_lanes(type), 0, string.sub(entry, zero + 1)) == 1 and before[type] == 0 then call('SADD', TYPES, type) end
end

local function leave(entry)
  local zero = string.find(entry, '\0', 1, true)
  call('ZREM', open_lanes(string.sub(entry, 1, zero - 1)), string.sub(entry, zero + 1))
end

-- Computes from the facts whether the lane may be served, and by which head. O(log n) however long it is.
local look
function look(lane, now)
  local is_device = string.sub(lane, 1, 1) ~= '~'
  local old, head = call('HGET', HEADS, lane), head_of(lane)
  if not head then
    if not old then return end
    if old ~= '' then leave(old) end
    call('HDEL', HEADS, lane)
    if is_device then call('ZREM', LANES, lane) end
    return
  end
  local new = ''
  if not (is_device and is_closed(lane, now)) then
    local item = record(id_of(head))
    if not item or item[STATE] ~= WAITING then -- whatever made it so: set it right, or every take would trip over it
      call('ZREM', at .. 'lane:' .. lane, head)
      return look(lane, now)
    end
    new = item[TYPE] .. '\0' .. head
  end
  if new == old then return end
  if old and old ~= '' then leave(old) end
  if new ~= '' then enter(new) end
  call('HSET', HEADS, lane, new)
  if is_device and not old then call('ZADD', LANES, 0, lane) end
end

local function next_due()
  local first = call('ZRANGE', WAITING_LATER, 0, 0, 'WITHSCORES')
  return first[2] and tonumber(first[2])
end

-- Items that have fallen due wait in their lanes from now on. True: there are more, call again.
local function promote(now)
  local due = call('ZRANGEBYSCORE', WAITING_LATER, '-inf', now, 'LIMIT', 0, PROMOTE)
  for _, id in ipairs(due) do
    local item = record(id)
    call('ZREM', WAITING_LATER, id)
    if item then wait_in_lane(id, item) end
  end
  return #due == PROMOTE
end

-- The last two steps of every script that changes something. First all that it touched is looked at.
local function settle(now)
  for _, lane in ipairs(looked) do look(lane, now) end
  looked = {}
  for rank, change in pairs(counted) do
    if change ~= 0 then call('HINCRBY', at .. 'counts', rank, change) end
  end
  counted = {}
end

-- Then whoever sleeps is woken if lanes of a type may be served where none could be before the script: a taker sleeps only
-- when it found none.
local function wake()
  for type, there in pairs(before) do
    if there == 0 and call('ZCARD', at .. 'open:' .. type) > 0 then ring = true end
  end
  if ring then call('PUBLISH', at .. 'bell', '') end
end
