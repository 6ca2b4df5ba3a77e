// Tests of the errors that a channel over real verbs reports if its peer dies, the network fails,
// or the peer breaks the protocol. Run as two ranks by tests/labs/rdma_lab; built like
// rdma_channel_test.cc.
#include <arpa/inet.h>
#include <linux/capability.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include <chrono>
#include <thread>

#include "common/socket_address.h"
#include "rdma/devices.h"
#include "rdma/resources.h"
#include "rdma/wire.h"
#include "tests/rdma_lab.h"

namespace {

using namespace adaptive;           // NOLINT: a test
using namespace adaptive::testing;  // NOLINT
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

double since_s(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Runs a command on the node as root.
void shell(const std::string& command) {
  check(std::system(command.c_str()) == 0, "'" + command + "' to work");
}

// ---- The peer dies

std::size_t size_of(int number) {
  return 1000 + static_cast<std::size_t>(number) % 30000;
}

enum class Doing { kSending, kReceiving, kWaiting };

void live_until_killed(const Lab& lab, int port, Doing doing) {
  End end = lab.open(port, small_slots());
  for (int i = 0;; ++i) {
    if (doing == Doing::kSending) {
      send_pattern(*end.sender, size_of(i), i);
      while (end.sender->pending() > 4) {
        end.sender->flush(soon());
      }
    } else if (doing == Doing::kReceiving) {
      check_arrival(take_arrival(end), size_of(i), i);
    } else {
      end.session.completions->wait(patient());
    }
  }
}

// Sends and receives messages until the channel fails, and returns the failure.
Failure work_until_failure(End& end, Doing peer_is) {
  int received = 0;
  for (int i = 0;;) {
    if (peer_is == Doing::kReceiving && end.sender->pending() < 4) {
      try {
        send_pattern(*end.sender, size_of(i), i);
        ++i;
      } catch (const PeerLostError&) {
        return await_failure(end);
      }
    }
    auto item = end.session.completions->wait(soon(peer_is == Doing::kReceiving ? 0 : 1000));
    if (!item) {
      continue;
    }
    if (auto* failure = std::get_if<Failure>(&*item)) {
      return *failure;
    }
    check_arrival(std::get<Arrival>(*item), size_of(received), received);
    ++received;
  }
}

void a_killed_peer_is_lost_at_once(Lab& lab, Doing peer_is, int after_ms) {
  const int port = lab.next_port();
  if (lab.rank() == 1) {
    Child victim([&] { live_until_killed(lab, port, peer_is); });
    ::usleep(static_cast<useconds_t>(after_ms) * 1000 + 300'000);
    lab.meet();
    victim.kill();
    lab.meet();
    return;
  }
  {
    End end = lab.open(port, small_slots());
    auto failed = std::make_shared<Clock::time_point>();
    Failure failure;
    // Meanwhile the other rank is killed by its parent process. The two ranks synchronize right
    // before and after.
    std::thread work([&] {
      failure = work_until_failure(end, peer_is);
      *failed = Clock::now();
    });
    lab.meet();
    const auto killed = Clock::now();
    work.join();
    const double took_s = std::chrono::duration<double>(*failed - killed).count();
    std::printf("     %.3f s: %s\n", took_s, failure.text.c_str());
    check(took_s < 5.0, "the loss within 5 s, not " + std::to_string(took_s));
    check(failure.kind == Failure::Kind::kPeerLost && failure.peer == 1, "a lost peer");
    check_contains(failure.text, "RDMA channel with rank 1 (stage 5): ");
    check_throws<PeerLostError>([&] { send_pattern(*end.sender, 10, 0); },
                                "RDMA channel with rank 1");
  }
  lab.meet();
}

// ---- The network

constexpr double kNoticedWithinS = 6.0;

struct Netem {
  explicit Netem(const std::string& what) { shell("tc qdisc add dev eth0 root netem " + what); }
  Netem(const Netem&) = delete;
  Netem& operator=(const Netem&) = delete;
  ~Netem() {
    if (std::system("tc qdisc del dev eth0 root") != 0) {
      std::printf("     the network stays disturbed\n");
    }
  }
};

// Cuts the network while rank 0 sends messages to rank 1, or while both ranks wait. Both ranks
// block their outgoing packets until both must have noticed the failure. Otherwise, the first rank
// to notice the failure could report it to the other rank, which must notice it without help.
void a_cut_link_is_a_loss_within_its_time(Lab& lab, bool sending) {
  RdmaOptions options = small_slots();
  options.silent_limit = sending ? milliseconds(30'000) : milliseconds(2'000);
  End end = lab.open(options);
  lab.meet();
  {
    const Netem cut("loss 100%");
    const auto start = Clock::now();
    if (sending && lab.rank() == 0) {
      send_pattern(*end.sender, 100, 0);
    }
    if (!sending || lab.rank() == 0) {
      const Failure failure = await_failure(end);
      std::printf("     %.3f s: %s\n", since_s(start), failure.text.c_str());
      check(failure.kind == Failure::Kind::kPeerLost, "a lost peer");
      check_contains(failure.text, sending ? "a write failed with RETRY_EXC_ERR" : "(limit 2 s, ");
      check(since_s(start) < kNoticedWithinS, "it to be noticed in time");
    }
    while (since_s(start) < kNoticedWithinS) {
      ::usleep(10'000);
    }
  }
  lab.meet();
}

void lost_packets_are_repeated(Lab& lab, std::size_t slot_bytes, int count) {
  RdmaOptions options;
  options.slot_bytes = slot_bytes;
  options.slots = 8;
  End end = lab.open(options);
  lab.meet();
  {
    const Netem disturbed("loss 2%");
    const auto start = Clock::now();
    int sent = 0;
    int received = 0;
    const auto size = [&](int number) { return slot_bytes + static_cast<std::size_t>(number); };
    while (sent < count || received < count) {
      if (sent < count && end.sender->pending() < 4) {
        send_pattern(*end.sender, size(sent), sent);
        ++sent;
      }
      if (auto item = end.session.completions->wait(soon(5))) {
        if (auto* failure = std::get_if<Failure>(&*item)) {
          throw std::runtime_error("message " + std::to_string(received) + ": " + failure->text);
        }
        check_arrival(std::get<Arrival>(*item), size(received), received);
        ++received;
      }
    }
    close(end);
    std::printf("     %d times %zu bytes both ways in %.1f s\n", count, slot_bytes, since_s(start));
  }
  lab.meet();
}

// ---- A peer that breaks the protocol

// A peer that follows the wire protocol without a channel, with the errors that a test wants.
class RawPeer {
 public:
  RawPeer(const Lab& lab, int port, const RdmaOptions& options, bool wrong_key, bool no_receives)
      : link_(lab.link(port)) {
    rdma::Wanted wanted;
    device_ = rdma::open_device(rdma::choose_port(list_rdma_devices(), wanted));
    const std::size_t stride = rdma::stride_of(options.slot_bytes);
    arena_ = std::make_unique<rdma::Arena>(device_, options.slots * stride, true);
    credit_ = std::make_unique<rdma::Arena>(device_, 4096, true);
    queue_ = rdma::create_completion_queue(*device_, 256);
    std::uint32_t inline_bytes = 64;
    out_ = rdma::create_queue_pair(*device_, queue_.get(), {32, 64}, &inline_bytes);
    in_ = rdma::create_queue_pair(*device_, queue_.get(), {32, 64}, &inline_bytes);
    rdma::EndpointRecord mine;
    mine.job = kJob;
    mine.slots = options.slots;
    mine.slot_bytes = options.slot_bytes;
    mine.stride_bytes = stride;
    mine.arena_address = arena_->address();
    mine.credit_address = credit_->address();
    rdma::Lane lane{out_->qp_num,
                    in_->qp_num,
                    5,
                    6,
                    arena_->remote_key(),
                    credit_->remote_key(),
                    device_->lid,
                    rdma::mtu_code(device_->choice.mtu_bytes),
                    2};
    lane.arena_key += wrong_key ? 1 : 0;
    std::memcpy(lane.gid.data(), device_->gid.raw, lane.gid.size());
    mine.lanes.push_back(lane);
    link_.send_record(rdma::encode(mine), {}, patient(), {});
    theirs_ = rdma::decode_endpoint(
        link_.recv_record(rdma::kLargestRecordBytes, 0, patient(), {}).bytes, lab.peer());
    const rdma::Lane& remote = theirs_.lanes.at(0);
    for (int i = 0; i < (no_receives ? 0 : 32); ++i) {
      ibv_recv_wr request{};
      ibv_recv_wr* refused = nullptr;
      check(::ibv_post_recv(in_.get(), &request, &refused) == 0, "a receive");
      check(::ibv_post_recv(out_.get(), &request, &refused) == 0, "a receive");
    }
    rdma::connect(out_.get(), *device_, {remote.qp_in, remote.psn_in, remote}, 5, 14);
    rdma::connect(in_.get(), *device_, {remote.qp_out, remote.psn_out, remote}, 6, 14);
    link_.send_record(rdma::encode_ready(), {}, patient(), {});
    rdma::decode_ready(link_.recv_record(rdma::kLargestRecordBytes, 0, patient(), {}).bytes,
                       lab.peer());
  }

  // Writes a message of `nbytes` zero bytes into a slot, with any immediate value.
  void write(const Message& message, unsigned slot, std::uint32_t immediate) {
    std::memcpy(arena_->data(), &message, sizeof(message));
    post(out_.get(), arena_->address(), arena_->local_key(),
         static_cast<std::uint32_t>(sizeof(message) + message.piece_bytes),
         theirs_.arena_address + slot * theirs_.stride_bytes, theirs_.lanes[0].arena_key,
         immediate);
  }

  void say_goodbye() { check(::send(link_.fd(), "g", 1, 0) == 1, "a goodbye"); }

  void write_credits(std::uint64_t word) {
    std::memcpy(arena_->data(), &word, sizeof(word));
    post(in_.get(), arena_->address(), arena_->local_key(), sizeof(word), theirs_.credit_address,
         theirs_.lanes[0].credit_key, 1);
  }

 private:
  void post(ibv_qp* pair, std::uint64_t from, std::uint32_t local_key, std::uint32_t size,
            std::uint64_t to, std::uint32_t remote_key, std::uint32_t immediate) {
    ibv_sge part{from, size, local_key};
    ibv_send_wr request{};
    request.sg_list = &part;
    request.num_sge = 1;
    request.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
    request.send_flags = IBV_SEND_SIGNALED;
    request.imm_data = htonl(immediate);
    request.wr.rdma.remote_addr = to;
    request.wr.rdma.rkey = remote_key;
    ibv_send_wr* refused = nullptr;
    check(::ibv_post_send(pair, &request, &refused) == 0, "a write");
    ibv_wc completion{};
    eventually([&] { return ::ibv_poll_cq(queue_.get(), 1, &completion) > 0; }, "a completion");
  }

  Link link_;
  std::shared_ptr<rdma::Device> device_;
  std::unique_ptr<rdma::Arena> arena_;
  std::unique_ptr<rdma::Arena> credit_;
  rdma::CompletionQueue queue_;
  rdma::QueuePair out_;
  rdma::QueuePair in_;
  rdma::EndpointRecord theirs_;
};

// Rank 0 has a real end of a channel, and rank 1 breaks the protocol. The error on rank 0 must name
// rank 1.
void misbehaviour_is_named(Lab& lab, const std::string& words, bool wrong_key, bool no_receives,
                           const std::function<void(End&)>& ours,
                           const std::function<void(RawPeer&)>& theirs) {
  const int port = lab.next_port();
  if (lab.rank() == 0) {
    End end = lab.open(port, small_slots());
    const auto start = Clock::now();
    ours(end);
    const Failure failure = await_failure(end);
    std::printf("     %.3f s: %s\n", since_s(start), failure.text.c_str());
    check(failure.kind == Failure::Kind::kTransport && failure.peer == 1, "a broken transport");
    check_contains(failure.text, words);
    check_throws<Error>([&] { send_pattern(*end.sender, 10, 0); }, words);
    lab.meet();
  } else {
    RawPeer peer(lab, port, small_slots(), wrong_key, no_receives);
    theirs(peer);
    lab.meet();
  }
  lab.meet();
}

Message proper(std::size_t nbytes, std::uint64_t sequence) {
  Message message = message_of(nbytes, static_cast<int>(sequence));
  message.job = kJob;
  message.sequence = sequence;
  message.piece_bytes = nbytes;
  return message;
}

std::uint32_t immediate(std::uint32_t number, std::uint8_t slot, bool control = false) {
  return rdma::pack({number, control, false, slot});
}

void wrong_writes_are_named(Lab& lab) {
  const auto named = [&](const std::string& words, const std::function<void(RawPeer&)>& theirs) {
    misbehaviour_is_named(lab, words, false, false, [](End&) {}, theirs);
  };
  named("write 10 came where 0 was expected",
        [](RawPeer& peer) { peer.write(proper(10, 0), 0, immediate(10, 0)); });
  named("slot 4 of 4 was written while it did not belong to the peer",
        [](RawPeer& peer) { peer.write(proper(10, 0), 0, immediate(0, 4)); });
  named("message 3 came where 0 was expected",
        [](RawPeer& peer) { peer.write(proper(10, 3), 0, immediate(0, 0)); });
  named("unknown control word 9",
        [](RawPeer& peer) { peer.write(proper(10, 0), 0, immediate(0, 9, true)); });
  named("where there is room for 8192", [](RawPeer& peer) {
    Message message = proper(8193, 0);
    message.piece_bytes = 8193;
    peer.write(message, 0, immediate(0, 0));
  });
  named("does not have its checksum", [](RawPeer& peer) {
    Message message = proper(10, 0);
    message.has_crc = 1;
    peer.write(message, 0, immediate(0, 0));
  });
}

// The peer's last control word is lost, so the goodbye over the link must be enough.
void a_goodbye_is_enough(Lab& lab, bool closes_first) {
  const int port = lab.next_port();
  if (lab.rank() == 1) {
    RawPeer peer(lab, port, small_slots(), false, false);
    if (closes_first) {
      Message end = proper(0, 0);
      end.kind = MessageKind::kEnd;
      peer.write(end, 0, immediate(0, 0));
    }
    peer.say_goodbye();
  } else {
    End end = lab.open(port, small_slots());
    if (closes_first) {
      lab.meet();  // the peer has closed the channel and takes no more messages
      close(end);
      check(!end.session.completions->wait(soon(1500)).has_value(), "no failure");
    } else {
      const Failure failure = await_failure(end);
      check(failure.kind == Failure::Kind::kPeerLost, "a lost peer");
      check_contains(failure.text, "it left without closing the channel");
      lab.meet();
    }
    return;
  }
  lab.meet();
}

// ---- Limits of the process

class NoLocking {
 public:
  NoLocking() {
    check(::getrlimit(RLIMIT_MEMLOCK, &limit_) == 0, "the limit");
    const rlimit none{64 << 10, limit_.rlim_max};
    check(::setrlimit(RLIMIT_MEMLOCK, &none) == 0, "another limit");
    set(false);
  }
  NoLocking(const NoLocking&) = delete;
  NoLocking& operator=(const NoLocking&) = delete;
  ~NoLocking() {
    set(true);
    ::setrlimit(RLIMIT_MEMLOCK, &limit_);
  }

 private:
  static void set(bool may) {
    __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
    __user_cap_data_struct data[_LINUX_CAPABILITY_U32S_3] = {};
    check(::syscall(SYS_capget, &header, data) == 0, "capabilities");
    auto& effective = data[CAP_TO_INDEX(CAP_IPC_LOCK)].effective;
    effective =
        may ? effective | CAP_TO_MASK(CAP_IPC_LOCK) : effective & ~CAP_TO_MASK(CAP_IPC_LOCK);
    check(::syscall(SYS_capset, &header, data) == 0, "other capabilities");
  }
  rlimit limit_{};
};

void the_limit_of_locked_memory_is_checked_first(Lab& lab) {
  const int port = lab.next_port();
  if (lab.rank() == 1) {
    const NoLocking limited;
    check_throws<Error>([&] { lab.open(port, RdmaOptions()); }, "ulimit -l unlimited");
  } else {
    check_throws<Error>(
        [&] { lab.open(port, RdmaOptions()); },
        "rank 1 cannot open an RDMA channel: one direction of an RDMA channel needs");
  }
  RdmaOptions huge;
  huge.slots = 64;
  huge.slot_bytes = std::size_t{1} << 30;
  const int other = lab.next_port();
  check_throws<Error>([&] { lab.open(other, huge); }, "one direction of an RDMA channel needs");
  lab.meet();
}

}  // namespace

int main(int argc, char** argv) {
  Lab lab;
  const LabTests test(lab, argc, argv);
  for (int after_ms : {0, 13, 170}) {
    const std::string when = ", after " + std::to_string(after_ms) + " ms";
    test("killed while sending" + when,
         [&] { a_killed_peer_is_lost_at_once(lab, Doing::kSending, after_ms); });
    test("killed while receiving" + when,
         [&] { a_killed_peer_is_lost_at_once(lab, Doing::kReceiving, after_ms); });
    test("killed while waiting" + when,
         [&] { a_killed_peer_is_lost_at_once(lab, Doing::kWaiting, after_ms); });
  }
  test("wrong remote key", [&] {
    misbehaviour_is_named(
        lab, "a write failed with REM_ACCESS_ERR", true, false,
        [](End& end) { send_pattern(*end.sender, 10, 0); }, [](RawPeer&) {});
  });
  test("no receives", [&] {
    misbehaviour_is_named(
        lab, "a write failed with RNR_RETRY_EXC_ERR", false, true,
        [](End& end) { send_pattern(*end.sender, 10, 0); }, [](RawPeer&) {});
  });
  test("credits for nothing", [&] {
    // If no messages are in flight, the next send is the first call that checks for errors.
    const auto send_until_refused = [](End& end) {
      try {
        for (int i = 0; i < 1000; ++i) {
          send_pattern(*end.sender, 10, i);
          ::usleep(10'000);
        }
      } catch (const Error&) {
      }
    };
    misbehaviour_is_named(lab, "it returned slots that it did not have", false, false,
                          send_until_refused, [](RawPeer& peer) { peer.write_credits(8); });
  });
  test("goodbye", [&] { a_goodbye_is_enough(lab, true); });
  test("goodbye without closing", [&] { a_goodbye_is_enough(lab, false); });
  test("wrong writes", [&] { wrong_writes_are_named(lab); });
  test("locked memory", [&] { the_limit_of_locked_memory_is_checked_first(lab); });
  test("cut link while sending", [&] { a_cut_link_is_a_loss_within_its_time(lab, true); });
  test("cut link while waiting", [&] { a_cut_link_is_a_loss_within_its_time(lab, false); });
  test("2% loss, small", [&] { lost_packets_are_repeated(lab, 4000, 300); });
  test("2% loss, large", [&] { lost_packets_are_repeated(lab, 1 << 20, 12); });
  return summary();
}
