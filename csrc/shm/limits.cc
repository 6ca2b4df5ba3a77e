#include "shm/limits.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>

#include "common/error.h"

namespace adaptive {
namespace {

constexpr std::uint64_t kUnlimited = std::numeric_limits<std::uint64_t>::max();
// Amount of memory that is left for other programs, so that a channel does not use up the machine's
// last pages.
constexpr std::uint64_t kReserveBytes = std::uint64_t{64} << 20;

// Returns the number at the beginning of a file, or an empty value if there is none (for example
// "max").
std::optional<std::uint64_t> read_number(const std::string& path) {
  std::ifstream file(path);
  std::uint64_t value = 0;
  return file >> value ? std::optional<std::uint64_t>(value) : std::nullopt;
}

void narrow(MemoryRoom* room, std::uint64_t bytes, const std::string& limit,
            const std::string& remedy) {
  if (bytes < room->bytes) {
    *room = {bytes, limit, remedy};
  }
}

// Applies the limit of one control group. The kernel counts the group's page cache as used, but
// frees it when memory is needed.
void narrow_by_group(MemoryRoom* room, const std::string& folder, bool second_version) {
  const std::string limit_file =
      folder + (second_version ? "/memory.max" : "/memory.limit_in_bytes");
  const std::string used_file =
      folder + (second_version ? "/memory.current" : "/memory.usage_in_bytes");
  const auto limit = read_number(limit_file);
  const auto used = read_number(used_file);
  if (!limit || !used) {
    return;
  }
  const std::string cache_name = second_version ? "inactive_file" : "total_inactive_file";
  const std::uint64_t cache = read_field(folder + "/memory.stat", cache_name);
  const std::uint64_t needed = *used - std::min(cache, *used);
  narrow(room, *limit - std::min(needed, *limit),
         "the memory limit of the container or control group, " + limit_file,
         "raise that limit (docker run --memory, resources.limits.memory, MemoryMax)");
}

// Applies the limits of the group and all its parents. In a container, the kernel may report a path
// of the host that does not exist in the container. The container's own limit is then in the top
// folder.
void narrow_by_groups(MemoryRoom* room, const std::string& mount, std::string path,
                      bool second_version) {
  while (!path.empty() && path != "/") {
    narrow_by_group(room, mount + path, second_version);
    const std::size_t slash = path.rfind('/');
    path.resize(slash == std::string::npos ? 0 : slash);
  }
  narrow_by_group(room, mount, second_version);
}

bool has_memory_controller(const std::string& names) {
  std::istringstream list(names);
  std::string name;
  while (std::getline(list, name, ',')) {
    if (name == "memory") {
      return true;
    }
  }
  return false;
}

// Reads lines "number:controllers:path". For control groups of version 2, the controllers are
// empty.
void narrow_by_cgroup(MemoryRoom* room, const SystemPaths& paths) {
  std::ifstream file(paths.proc + "/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) {
      continue;
    }
    const std::string names = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    if (names.empty()) {
      narrow_by_groups(room, paths.cgroup, path, true);
      narrow_by_groups(room, paths.cgroup + "/unified", path, true);
    } else if (has_memory_controller(names)) {
      narrow_by_groups(room, paths.cgroup + "/memory", path, false);
    }
  }
}

void narrow_by_address_space(MemoryRoom* room, const SystemPaths& paths) {
  rlimit limit{};
  const auto pages = read_number(paths.proc + "/self/statm");
  if (::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY || !pages) {
    return;
  }
  const std::uint64_t used = *pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  narrow(room, limit.rlim_cur - std::min<std::uint64_t>(used, limit.rlim_cur),
         "the limit of this process's address space, RLIMIT_AS", "ulimit -v unlimited");
}

}  // namespace

std::uint64_t read_field(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string word;
    std::uint64_t value = 0;
    if (words >> word >> value && word == name) {
      return value;
    }
  }
  return 0;
}

MemoryRoom memory_room(const SystemPaths& paths) {
  MemoryRoom room;
  room.bytes = kUnlimited;
  const std::uint64_t available_kib = read_field(paths.proc + "/meminfo", "MemAvailable:");
  if (available_kib != 0) {
    narrow(&room, available_kib * 1024, "the free memory of this machine, MemAvailable",
           "free memory on it");
  }
  narrow_by_cgroup(&room, paths);
  narrow_by_address_space(&room, paths);
  return room;
}

void check_memory(std::uint64_t bytes, const std::string& purpose, const SystemPaths& paths) {
  const MemoryRoom room = memory_room(paths);
  if (room.bytes >= kReserveBytes && bytes <= room.bytes - kReserveBytes) {
    return;
  }
  throw Error(purpose + " needs " + bytes_text(bytes) + " of shared memory, but " +
              bytes_text(room.bytes) + " are left within " + room.limit + " (" +
              bytes_text(kReserveBytes) + " of it stay free): use fewer or smaller slots, or " +
              room.remedy);
}

std::string bytes_text(std::uint64_t bytes) {
  constexpr std::array<const char*, 5> kUnits{"bytes", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1024.0 && unit + 1 < kUnits.size()) {
    value /= 1024.0;
    ++unit;
  }
  char text[48];
  std::snprintf(text, sizeof(text), "%.4g %s", value, kUnits[unit]);
  return text;
}

}  // namespace adaptive
