-- push: each task once; pushed again it takes the newer due time and key, and a lease it had is void.
-- args     {now ms, {{task id, device or '', lane key, due ms, type, told or ''}, ...}}
-- answers  true
-- Repeated it changes nothing but a lease that was given meanwhile.
-- What is told of a task is kept while few tasks are queued: of a long queue it is old when its turn comes.
local FEW = 5000
local now, pushed = args[1], args[2]
local few = call('ZCARD', IDS) < FEW
local due_before = next_due()
for _, row in ipairs(pushed) do
  local id, crashes = row[1], 0
  local old = record(id)
  if old then
    crashes = old[CRASHES]
    withdraw(id, old)
  else
    call('ZADD', IDS, 0, id)
  end
  local item = {row[2], row[3], row[4], row[5], DELAYED, crashes, '', '', few and row[6] or ''}
  if item[DUE] > now then
    keep(id, item)
    call('ZADD', WAITING_LATER, item[DUE], id)
  else
    wait_in_lane(id, item)
  end
end
settle(now)
local due_now = next_due()
ring = due_now ~= nil and (not due_before or due_now < due_before) -- sleepers know of a later time
wake()
return pack(true)
