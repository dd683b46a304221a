-- remove: the tasks are final. What is leased stays leased.
-- args     {now ms, {task id, ...}}
-- answers  true
local now = args[1]
for _, id in ipairs(args[2]) do
  local item = record(id)
  if item and item[STATE] ~= LEASED then drop(id, item) end
end
settle(now)
wake()
return pack(true)
