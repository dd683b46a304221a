-- places: where tasks stand.
-- args     {now ms, {task id, ...}}
-- answers  {{task id, state, place from 1 or 0}, ...}, unknown ones left out; nil: call again
local now = args[1]
local more = promote(now)
settle(now)
wake()
if more then return false end
local found = {}
for _, id in ipairs(args[2]) do
  local item = record(id)
  if item then
    local place = 0
    if item[STATE] == WAITING then
      place = item[DEVICE] == '' and 1 or call('ZRANK', at .. 'lane:' .. item[DEVICE], member_of(id, item)) + 1
    end
    found[#found + 1] = {id, item[STATE], place}
  end
end
return pack(found)
