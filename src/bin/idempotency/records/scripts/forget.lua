redis.call('DEL', key)
return { 'applied' }
