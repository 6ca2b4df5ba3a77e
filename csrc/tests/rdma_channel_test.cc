// The contract of a channel over real verbs, run as two ranks by tests/labs/rdma_lab. With an
// argument, only tests whose name contains it. Build: c++ -std=c++17 -DMEGATRON_ADAPTIVE_RDMA=1 -I
// csrc -pthread <this> csrc/rdma/*.cc and csrc/common/{assembler,completions,copy,hello,link,
// link_watch,listener,message,reactor,socket_address,socket_io,fork_safe_fd}.cc
// -libverbs -ldl
#include <chrono>
#include <random>
#include <thread>

#include "tests/rdma_lab.h"

namespace {

using namespace adaptive;           // NOLINT: a test
using namespace adaptive::testing;  // NOLINT
using std::chrono::milliseconds;

std::vector<std::size_t> sizes_around(std::size_t slot_bytes) {
  return {0,
          1,
          64,
          100,
          128,
          4096,
          slot_bytes - 1,
          slot_bytes,
          slot_bytes + 1,
          2 * slot_bytes,
          5 * slot_bytes + 17,
          40 * slot_bytes};
}

// One direction at a time: `from` sends all sizes, the other checks.
void any_size_in_order(Lab& lab, const RdmaOptions& options, int from) {
  End end(lab, lab.next_port(), options);
  const auto sizes = sizes_around(options.slot_bytes);
  if (lab.rank() == from) {
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      send(*end.sender, sizes[i], i);
    }
  } else {
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      check_arrival(next_arrival(*end.session.completions), sizes[i], i);
    }
  }
  end.close();
  lab.meet();
}

void both_directions_at_once(Lab& lab, const RdmaOptions& options, std::size_t count) {
  End end(lab, lab.next_port(), options);
  std::mt19937 random(1);
  std::vector<std::size_t> sizes(count);
  for (auto& size : sizes) {
    size = random() % (random() % 5 == 0 ? 4 * options.slot_bytes : options.slot_bytes);
  }
  std::size_t sent = 0;
  std::size_t received = 0;
  while (sent < count || received < count) {
    if (sent < count && end.sender->pending() < 8) {
      send(*end.sender, sizes[sent], sent);
      ++sent;
    }
    const bool must_wait = sent == count || end.sender->pending() >= 8;
    auto item =
        must_wait ? end.session.completions->wait(soon(5)) : end.session.completions->poll();
    if (item) {
      check(std::holds_alternative<Arrival>(*item), "an arrival");
      check_arrival(std::get<Arrival>(*item), sizes[received], received);
      ++received;
    }
  }
  end.close();
  lab.meet();
}

void pieces_move_while_the_receiver_computes(Lab& lab) {
  const RdmaOptions options = small_slots();
  End end(lab, lab.next_port(), options);
  const std::size_t size = 100 * options.slot_bytes;
  if (lab.rank() == 0) {
    send(*end.sender, size, 0);
    eventually([&] { return end.sender->pending() == 0; }, "everything to be with the peer");
    lab.meet();
  } else {
    lab.meet();
    check_arrival(next_arrival(*end.session.completions), size, 0);
  }
  end.close();
  lab.meet();
}

// Who waited in vain has asked for an event of anything, which the first piece uses up.
void pieces_move_after_a_wait_in_vain(Lab& lab) {
  const RdmaOptions options = small_slots();
  End end(lab, lab.next_port(), options);
  const std::size_t size = 3 * options.slots * options.slot_bytes;
  for (std::uint64_t i = 0; i < 40; ++i) {
    if (lab.rank() == 0) {
      lab.meet();
      send(*end.sender, size, i);
      eventually([&] { return end.sender->pending() == 0; }, "everything to be with the peer");
      lab.meet();
    } else {
      const auto soon = Deadline::after(std::chrono::milliseconds(2));
      check(!end.session.completions->wait(soon), "nothing to be there");
      lab.meet();
      lab.meet();
      check_arrival(next_arrival(*end.session.completions), size, i);
    }
  }
  end.close();
  lab.meet();
}

void a_closed_channel_says_so(Lab& lab) {
  const RdmaOptions options = small_slots();
  const int port = lab.next_port();
  auto end = std::make_unique<End>(lab, port, options);
  if (lab.rank() == 0) {
    send(*end->sender, 10, 0);
    end->close();
    end->close();
    check_throws<Error>([&] { send(*end->sender, 10, 1); }, "closed by this end");
    end->sender.reset();
    lab.meet();
  } else {
    Arrival arrival = next_arrival(*end->session.completions);
    lab.meet();
    check(!end->session.completions->wait(soon(100)).has_value(), "no failure after an end");
    check_throws<Error>([&] { send(*end->sender, 10, 0); }, "closed by the peer");
    check(end->sender->flush(soon()), "nothing to flush any more");
    end.reset();
    check_arrival(arrival, 10, 0);  // a view outlives its channel
  }
  lab.meet();
}

void leaving_without_closing_is_a_failure(Lab& lab) {
  End end(lab, lab.next_port(), small_slots());
  if (lab.rank() == 0) {
    send(*end.sender, 10, 0);
    end.sender.reset();
  } else {
    check_arrival(next_arrival(*end.session.completions), 10, 0);
    const Failure failure = next_failure(*end.session.completions);
    check(failure.kind == Failure::Kind::kPeerLost && failure.peer == 0, "a lost peer");
    check_contains(failure.text,
                   "rank 0 of the lab: it left without closing the channel; the last message from "
                   "it was F chunk 0 microbatch 0 of step 0");
    check_throws<PeerLostError>([&] { send(*end.sender, 10, 0); }, "left without closing");
    check_throws<PeerLostError>([&] { end.sender->flush(soon()); }, "left without closing");
  }
  lab.meet();
}

void one_thread_sends_while_another_waits(Lab& lab) {
  const RdmaOptions options = small_slots();
  End end(lab, lab.next_port(), options);
  constexpr std::size_t kCount = 500;
  std::string failure;
  std::thread sending([&] {
    try {
      for (std::size_t i = 0; i < kCount; ++i) {
        while (end.sender->pending() > 16) {
          end.sender->flush(soon());
        }
        send(*end.sender, 5000 + i * 13, i);
      }
      end.close();
    } catch (const std::exception& error) {
      failure = error.what();
    }
  });
  for (std::size_t i = 0; i < kCount; ++i) {
    check_arrival(next_arrival(*end.session.completions), 5000 + i * 13, i);
  }
  sending.join();
  check(failure.empty(), failure);
  lab.meet();
}

// A data loader's child has copies of everything, and the device's state is the parent's.
void a_forked_child_disturbs_nothing(Lab& lab) {
  auto end = std::make_unique<End>(lab, lab.next_port(), small_slots());
  for (std::size_t i = 0; i < 20; ++i) {
    send(*end->sender, 1000, i);
    auto arrival = std::make_unique<Arrival>(next_arrival(*end->session.completions));
    if (i % 5 == 0) {
      Child([&] {
        arrival.reset();
        end.reset();
      }).join();
    }
    check_arrival(*arrival, 1000, i);
  }
  end->close();
  lab.meet();
}

void different_options_are_refused(Lab& lab) {
  RdmaOptions options = small_slots();
  options.slots += static_cast<unsigned>(lab.rank());
  check_throws<Error>([&] { End(lab, lab.next_port(), options); }, "with slots ");
  lab.meet();
  options = small_slots();
  if (lab.rank() == 1) {
    options.device = "rxe7";
  }
  check_throws<Error>([&] { End(lab, lab.next_port(), options); },
                      lab.rank() == 1
                          ? "there is no RDMA port of device 'rxe7'"
                          : "rank 1 cannot open an RDMA channel: there is no RDMA port");
  lab.meet();
}

void two_channels_side_by_side(Lab& lab) {
  End one(lab, lab.next_port(), small_slots());
  End two(lab, lab.next_port(), small_slots());
  for (std::size_t i = 0; i < 40; ++i) {
    send(*one.sender, 1000, i);
    send(*two.sender, 2000, i);
  }
  for (std::size_t i = 0; i < 40; ++i) {
    check_arrival(next_arrival(*two.session.completions), 2000, i);
    check_arrival(next_arrival(*one.session.completions), 1000, i);
  }
  one.close();
  two.close();
  lab.meet();
}

RdmaOptions with(RdmaOptions options, const std::function<void(RdmaOptions&)>& change) {
  change(options);
  return options;
}

}  // namespace

int main(int argc, char** argv) {
  Lab lab;
  const LabTests test(lab, argc, argv);
  const RdmaOptions four_pairs = with(small_slots(), [](auto& o) { o.num_qps = 4; });
  const RdmaOptions one_slot = with(small_slots(), [](auto& o) { o.slots = 1; });
  const RdmaOptions checksums = with(small_slots(), [](auto& o) { o.crc = true; });
  const RdmaOptions many = with(small_slots(), [](auto& o) {
    o.slots = 64;
    o.num_qps = 3;
    o.write_bytes = 4096;
  });
  const RdmaOptions small_mtu = with(small_slots(), [](auto& o) { o.mtu_bytes = 512; });
  for (int from : {0, 1}) {
    const std::string who = ", from rank " + std::to_string(from);
    test("any size in order" + who, [&] { any_size_in_order(lab, small_slots(), from); });
    test("any size, one slot" + who, [&] { any_size_in_order(lab, one_slot, from); });
    test("any size, four queue pairs" + who, [&] { any_size_in_order(lab, four_pairs, from); });
  }
  test("any size, default options", [&] { any_size_in_order(lab, RdmaOptions(), 0); });
  test("any size, checksums", [&] { any_size_in_order(lab, checksums, 0); });
  test("any size, MTU 512", [&] { any_size_in_order(lab, small_mtu, 0); });
  test("both directions", [&] { both_directions_at_once(lab, small_slots(), 1000); });
  test("both directions, one slot", [&] { both_directions_at_once(lab, one_slot, 300); });
  test("both directions, 64 slots, three queue pairs",
       [&] { both_directions_at_once(lab, many, 1000); });
  test("pieces while computing", [&] { pieces_move_while_the_receiver_computes(lab); });
  test("pieces after a wait", [&] { pieces_move_after_a_wait_in_vain(lab); });
  test("close", [&] { a_closed_channel_says_so(lab); });
  test("leaving without closing", [&] { leaving_without_closing_is_a_failure(lab); });
  test("two threads", [&] { one_thread_sends_while_another_waits(lab); });
  test("fork", [&] { a_forked_child_disturbs_nothing(lab); });
  test("different options", [&] { different_options_are_refused(lab); });
  test("two channels", [&] { two_channels_side_by_side(lab); });
  return summary();
}
