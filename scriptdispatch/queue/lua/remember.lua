-- Heartbeats of nodes, and workers that ended: keeps rows by id and forgets those that are older than a week.
-- args     {which: 'nodes' or 'gone', now ms, oldest ms to keep, {{id, row}, ...}}
-- answers  true
--   nodes, gone            hash  id → row
--   nodes_times, gone_times zset  id by the ms of its last row
local rows, times = at .. args[1], at .. args[1] .. '_times'
for _, row in ipairs(args[4]) do
  call('HSET', rows, row[1], row[2])
  call('ZADD', times, args[2], row[1])
end
for _, id in ipairs(call('ZRANGEBYSCORE', times, '-inf', '(' .. string.format('%.0f', args[3]), 'LIMIT', 0, 1000)) do
  call('HDEL', rows, id)
  call('ZREM', times, id)
end
return pack(true)
