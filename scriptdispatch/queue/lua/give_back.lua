-- give_back: back into the lane, place kept. An older lease than the item's does nothing, but its lane is looked at.
-- args     {now ms, {{task id, device or '', lease}, ...}, crashed: 1 if the worker died with them in hand, else 0}
-- answers  true
-- Repeated it finds the lease gone and counts no second crash.
local now, crashed = args[1], args[3]
for _, row in ipairs(args[2]) do
  local id = row[1]
  local item = record(id)
  if item and item[STATE] == LEASED and item[LEASE] == row[3] then
    item[CRASHES] = item[CRASHES] + crashed
    give_back(id, item)
  end
  look_at(lane_of(id, row[2]))
end
settle(now)
wake()
return pack(true)
