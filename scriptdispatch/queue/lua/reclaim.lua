-- reclaim: gives back what owners without a valid lease had in hand, and lays expired locks aside.
-- args     {now ms, how many of each at most}
-- answers  {items given back, true if there is more to do}
local now, limit = args[1], args[2]
local back, more = 0, false
for _, owner in ipairs(call('ZRANGEBYSCORE', at .. 'owners', '-inf', now)) do
  local hand = at .. 'leased:' .. owner
  for _, id in ipairs(call('SRANDMEMBER', hand, limit - back)) do
    local item = record(id)
    call('SREM', hand, id)
    if item and item[STATE] == LEASED and item[OWNER] == owner then
      give_back(id, item)
      back = back + 1
    end
  end
  if call('EXISTS', hand) == 0 then
    call('ZREM', at .. 'owners', owner)
  else
    more = true
    break
  end
end
local over = call('ZRANGEBYSCORE', LOCK_ENDS, '-inf', now, 'LIMIT', 0, limit)
for _, device in ipairs(over) do
  call('ZREM', LOCK_ENDS, device)
  if not lock_of(device, now) then
    call('HDEL', LOCKS, device)
    call('ZREM', LOCK_NAMES, device)
  end
  look_at(device)
end
settle(now)
wake()
return pack({back, more or #over == limit})
