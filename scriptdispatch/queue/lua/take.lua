-- take: leases the heads of open lanes, the smallest keys first.
-- args     {now ms, owner, lease, limit, ms until which the owner's leases hold if it has never renewed, types or false, repeated}
-- answers  {{{task id, device or '', lane key, type, crashes, told or '', free}, ...}, ms of the next due item or -1};
--          free: 1 + the last fence of its device, or 1 if it is not remembered; 0 if somebody has its lock, or may have it;
--          nil: more has fallen due than one call handles, call again
-- repeated: an earlier call under this lease got no answer. What it may have taken goes back first, so nothing of it is
-- lost to an owner that does not know of it.
local now, owner, lease, limit, first_until, types, repeated = args[1], args[2], args[3], args[4], args[5], args[6], args[7]

-- Byte by byte: Lua compares strings by the server's locale.
local function is_before(one, other)
  local index = 1
  while true do
    local a, b = string.byte(one, index), string.byte(other, index)
    if a ~= b then return a == nil or (b ~= nil and a < b) end
    if a == nil then return false end
    index = index + 1
  end
end

local function heads_of(types)
  local rows = {}
  for _, type in ipairs(types) do
    local heads = call('ZRANGE', at .. 'open:' .. type, 0, limit - 1)
    if #heads > 0 then rows[#rows + 1] = heads end
  end
  if #rows < 2 then return rows[1] or {} end
  local merged, places = {}, {}
  for n = 1, #rows do places[n] = 1 end
  while #merged < limit do
    local best
    for n, heads in ipairs(rows) do
      local head = heads[places[n]]
      if head and (not best or is_before(head, rows[best][places[best]])) then best = n end
    end
    if not best then break end
    merged[#merged + 1] = rows[best][places[best]]
    places[best] = places[best] + 1
  end
  return merged
end

if repeated then
  for _, id in ipairs(call('SMEMBERS', at .. 'leased:' .. owner)) do
    local item = record(id)
    if item and item[LEASE] == lease then give_back(id, item) end
  end
end
local intact = call('EXISTS', at .. 'epoch') == 1
local more = promote(now)
settle(now)
if more then
  wake()
  return false
end
local leased = {}
for _, head in ipairs(heads_of(types or call('SMEMBERS', TYPES))) do
  local id = id_of(head)
  local item = record(id)
  if item and item[STATE] == WAITING then
    withdraw(id, item)
    local told = item[TOLD] or ''
    item[STATE], item[OWNER], item[LEASE], item[TOLD] = LEASED, owner, lease, ''
    keep(id, item)
    call('SADD', at .. 'leased:' .. owner, id)
    if item[DEVICE] ~= '' then call('HSET', OUT, item[DEVICE], id) end
    local free = intact and item[DEVICE] ~= '' and not lock_of(item[DEVICE], now) and 1 + last_fence(item[DEVICE], now)
    leased[#leased + 1] = {id, item[DEVICE], item[KEY], item[TYPE], item[CRASHES], told, free or 0}
  else -- the entry is wrong, whatever made it so: without it the next take does not trip over it
    for _, type in ipairs(call('SMEMBERS', TYPES)) do call('ZREM', at .. 'open:' .. type, head) end
  end
end
if #leased > 0 then call('ZADD', at .. 'owners', 'NX', first_until, owner) end
settle(now)
wake()
return pack({leased, next_due() or -1})
