-- finish (W8): done with these. An older lease than the item's does nothing, but its lane is looked at all the same.
-- args     {now ms, {{task id, device or '', lease}, ...}}
-- answers  true
local now = args[1]
for _, row in ipairs(args[2]) do
  local id = row[1]
  local item = record(id)
  if item and item[STATE] == LEASED and item[LEASE] == row[3] then drop(id, item) end
  look_at(lane_of(id, row[2]))
end
settle(now)
wake()
return pack(true)
