// How much memory this process may still take, and who says so.
#pragma once

#include <cstdint>
#include <string>

namespace adaptive {

struct MemoryRoom {
  std::uint64_t bytes = 0;
  std::string limit;   // "memory.max of the container, /sys/fs/cgroup/x/memory.max"
  std::string remedy;  // "give the container more memory"
};

// Where the kernel tells, other than in tests.
struct SystemPaths {
  std::string proc = "/proc";
  std::string cgroup = "/sys/fs/cgroup";
};

// The narrowest of: free memory of the machine, limits of the control groups (both versions) this
// process is in, address space. What cannot be read does not limit.
MemoryRoom memory_room(const SystemPaths& paths = {});

// Throws Error, naming the limit and what to change, unless `bytes` fit into the memory that is
// left, with a reserve. `purpose`: "the channel to rank 3 (8 slots of 4 MiB)".
void check_memory(std::uint64_t bytes, const std::string& purpose, const SystemPaths& paths = {});

// The number after `name` in a file of lines "name number"; 0 where it does not stand.
std::uint64_t read_field(const std::string& path, const std::string& name);

// "1.5 GiB"
std::string bytes_text(std::uint64_t bytes);

}  // namespace adaptive
