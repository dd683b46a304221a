-- resign: gives up the leader's lease if this node has it. The term stays.
-- args     {node id}
-- answers  true
if call('HGET', at .. 'leader', 'node') == args[1] then call('HDEL', at .. 'leader', 'node', 'until') end
return pack(true)
