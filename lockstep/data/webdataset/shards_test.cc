// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/webdataset/shards.h"

#include <algorithm>
#include <iomanip>
#include <random>

#include <nlohmann/json.hpp>

#include "lockstep/base/cache_line.h"
#include "lockstep/base/text.h"
#include "lockstep/data/formats/readers.h"
#include "lockstep/images.h"
#include "lockstep/loader.h"
#include "tests/data/files.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::first_indices;
using testing::message_of;
using testing::npy_text;
using testing::TempFolder;
using testing::write_image_folder;

std::vector<int64_t> all_of(const Dataset& dataset) { return first_indices(dataset.size()); }

std::shared_ptr<const Dataset> open(const std::filesystem::path& path, const ImageTransforms& transforms = {}) {
  return dataset_of(std::make_shared<ShardReader>(path), transforms);
}

TEST(Shards, give_back_the_same_images) {
  const TempFolder folder;
  const ImageDataset original(synthetic_images(57, {3, 5, 7}, 4), {});
  pack(original, folder / "p", {.shard_bytes = 9000, .keep_order = true});
  EXPECT_GT(ShardReader(folder / "p").shard_sizes().size(), 3U);
  const auto packed = open(folder / "p");
  ASSERT_EQ(packed->size(), 57);
  EXPECT_EQ(packed->name(), "synthetic");
  const Batch a = packed->make_batch(all_of(*packed));
  const Batch b = original.make_batch(all_of(original));
  EXPECT_TRUE(torch::equal(a.data, b.data));
  EXPECT_TRUE(torch::equal(a.target, b.target));
}

TEST(Shards, keep_encoded_images_as_files) {
  const TempFolder folder;
  write_image_folder(folder / "images", 6);
  const auto source = std::make_shared<ImageFolder>(folder / "images");
  const ImageTransforms small{.height = 20, .width = 20};
  const ImageDataset original(source, small);
  pack(original, folder / "p", {.keep_order = true});
  const auto packed = open(folder / "p", small);
  EXPECT_TRUE(torch::equal(packed->make_batch(all_of(*packed)).data, original.make_batch(all_of(original)).data));
  EXPECT_EQ(ShardReader(folder / "p").info().class_names, (std::vector<std::string>{"a", "b"}));
}

TEST(Shards, keep_the_dtype_of_tables) {
  const TempFolder folder;
  const TensorDataset original("table", torch::arange(30, torch::kInt16).reshape({10, 3}), torch::arange(10));
  pack(original, folder / "p", {.keep_order = true});
  EXPECT_EQ(ShardReader(folder / "p").first().dtype, torch::kInt16);
  const auto packed = open(folder / "p");
  EXPECT_TRUE(torch::equal(packed->make_batch(all_of(*packed)).data, torch::arange(30).reshape({10, 3})));
}

TEST(Shards, have_the_index_that_wids_reads) {
  const TempFolder folder;
  const TensorDataset original("table", torch::arange(300).reshape({100, 3}), torch::arange(100));
  pack(original, folder / "p", {.shard_bytes = 60000});
  const auto index = nlohmann::json::parse(read_file(folder / "p/shards.json"));
  EXPECT_EQ(index["__kind__"], "wids-shard-index-v1");
  EXPECT_EQ(index["wids_version"], 1);
  int samples = 0;
  for (const auto& shard : index["shardlist"]) {
    EXPECT_EQ(shard["filesize"], std::filesystem::file_size(folder / "p" / shard["url"].get<std::string>()));
    samples += shard["nsamples"].get<int>();
  }
  EXPECT_GT(index["shardlist"].size(), 1U);
  EXPECT_EQ(samples, 100);
}

TEST(Shards, refuse_one_that_becomes_shorter_while_it_is_in_use) {
  const TempFolder folder;
  const TensorDataset original("table", torch::arange(3000).reshape({1000, 3}), torch::arange(1000));
  pack(original, folder / "p", {.keep_order = true});
  const auto packed = open(folder / "p");
  std::filesystem::resize_file(folder / "p/00000.tar", 0);
  const std::string message = message_of<DataError>([&] { packed->make_batch(all_of(*packed)); });
  EXPECT_TRUE(contains(message, "00000.tar: it became shorter while it was in use"));
}

TEST(Shards, give_every_sample_once_for_any_ranks_shuffled_within_windows) {
  const TempFolder folder;
  const TensorDataset original("numbers", torch::arange(500, torch::kInt32).reshape({500, 1}), torch::arange(500));
  pack(original, folder / "p", {.shard_bytes = 90000});
  for (const int ranks : {1, 3}) {
    std::mutex mutex;
    std::vector<int64_t> seen;
    run_ranks(ranks, [&](World& world) {
      const auto order = window_order(ShardReader(folder / "p").shard_sizes(), 64);
      Loader loader(world, open(folder / "p"), {.batch_size = 20, .seed = 4, .workers = 2, .order = order});
      for (const Batch& batch : loader.epoch(2)) {
        EXPECT_TRUE(torch::equal(batch.data.squeeze(1), batch.target));
        const std::lock_guard lock(mutex);
        for (int64_t i = 0; i < batch.size(); ++i) seen.push_back(batch.target[i].item<int64_t>());
      }
    });
    std::sort(seen.begin(), seen.end());
    EXPECT_EQ(seen, all_of(original));
  }
}

class DamagedShard : public ::testing::Test {
 protected:
  DamagedShard() {
    const TensorDataset original("numbers", torch::arange(40, torch::kInt32).reshape({20, 2}), torch::arange(20));
    pack(original, folder / "p", {.keep_order = true});
    shard = read_file(path);
  }
  std::string refusal() {
    return message_of<DataError>([&] {
      const auto dataset = open(folder / "p");
      dataset->make_batch(all_of(*dataset));
    });
  }
  TempFolder folder;
  std::filesystem::path path = folder / "p/00000.tar";
  std::string shard;
};

TEST_F(DamagedShard, names_the_sample_whose_bytes_changed) {
  constexpr size_t kSample = 4 * 512, kArray = 3 * 512;
  std::string changed = shard;
  changed[3 * kSample + kArray + 128] ^= 1;
  write_file(path, changed);
  EXPECT_TRUE(contains(refusal(), "a sample's checksum does not match"));
  EXPECT_TRUE(contains(refusal(), concat(path.string(), ", offset ", 3 * kSample + kArray)));
  changed = shard;
  changed[3 * kSample + 512] = '7';  // another class
  write_file(path, changed);
  EXPECT_TRUE(contains(refusal(), "a sample's checksum does not match"));
}

TEST_F(DamagedShard, is_refused_if_cut_at_any_byte_of_a_file) {
  for (size_t length = 0; length <= shard.size() - 1024; length += 256) {
    write_file(path, shard.substr(0, length));
    EXPECT_TRUE(contains(refusal(), "00000.tar: it is cut")) << length;
  }
}

TEST_F(DamagedShard, is_refused_for_headers_and_descriptions_that_changed) {
  std::string changed = shard;
  changed[2048] ^= 1;
  write_file(path, changed);
  EXPECT_TRUE(contains(refusal(), "no tar header where one should be"));
  write_file(path, shard.substr(2048));
  EXPECT_TRUE(contains(refusal(), "20 samples expected"));
  std::filesystem::remove(path);
  EXPECT_TRUE(contains(refusal(), "No such file"));
  std::filesystem::remove(folder / "p/shards.json");
  EXPECT_TRUE(contains(refusal(), "holds no samples"));
}

TEST_F(DamagedShard, is_never_overwritten) {
  const TensorDataset other("other", torch::zeros({1, 1}), torch::zeros({1}, torch::kInt64));
  const auto refused = [&] { return message_of<UsageError>([&] { pack(other, folder / "p"); }); };
  EXPECT_TRUE(contains(refused(), "holds shards already"));
  std::filesystem::remove(folder / "p/shards.json");
  EXPECT_TRUE(contains(refused(), "holds shards already"));
  const TensorDataset floats("floats", torch::zeros({1, 1}), torch::zeros({1}));
  const TensorDataset masked("masked", torch::zeros({1, 1}), torch::zeros({1}, torch::kInt64),
                             {{"mask", torch::ones({1})}});
  for (const TensorDataset& each : {floats, masked})
    EXPECT_TRUE(
        contains(message_of<UsageError>([&] { pack(each, folder / "f"); }), "one whole number beside its data"));
}

TEST_F(DamagedShard, is_refused_if_packing_was_interrupted) {
  {
    ShardWriter writer(folder / "q", 1);
    writer.add({.target = 1, .shape = {0}});
  }
  EXPECT_TRUE(std::filesystem::exists(folder / "q/00000.tar"));
  EXPECT_TRUE(contains(message_of<DataError>([&] { open(folder / "q"); }), "did not finish this folder"));
  for (const auto dtype : {torch::kBFloat16, torch::kBool})
    EXPECT_TRUE(contains(
        message_of<UsageError>([&] { ShardWriter(folder / std::string(c10::toString(dtype))).add({.dtype = dtype}); }),
        "can't be written as .npy"));
}

// Shards of others, byte by byte.
class ForeignShards : public ::testing::Test {
 protected:
  static std::string member(const std::string& name, const std::string& content) {
    std::string bytes = tar_header(name, content.size()) + content;
    bytes.resize(round_up(bytes.size(), size_t{kTarBlock}));
    return bytes;
  }
  static std::string number(float value) {
    return npy_text("<f4", "(1,)", {reinterpret_cast<const char*>(&value), sizeof value});
  }
  static std::string with_sum(std::string bytes, int change) {
    const int sum = std::stoi(bytes.substr(148, 7), nullptr, 8) + change;
    concat(std::oct, std::setfill('0'), std::setw(7), sum).copy(bytes.data() + 148, 7);
    return bytes;
  }
  // A member of another type, which says something of the next one.
  static std::string before(char type, const std::string& content) {
    std::string bytes = with_sum(member("x", content), type - '0');
    bytes[156] = type;
    return bytes;
  }
  std::filesystem::path write(const std::string& name, const std::string& members) {
    write_file(folder / name, members + std::string(1024, '\0'));
    return folder / name;
  }
  std::vector<int64_t> targets_in(const std::filesystem::path& path) {
    const auto dataset = open(path);
    const Batch batch = dataset->make_batch(all_of(*dataset));
    const auto* const first = batch.target.const_data_ptr<int64_t>();
    return {first, first + batch.size()};
  }
  std::string refusal(const std::string& members) {
    const auto path = write("r.tar", members);
    return message_of<DataError>([&] { targets_in(path); });
  }
  TempFolder folder;
};

TEST_F(ForeignShards, are_grouped_by_the_name_up_to_the_first_dot) {
  const auto path =
      write("a.tar", before('5', "") + member("README", "not a sample") + member("d.1/x.seg.npy", "?") +
                         member("d.1/x.NPY", number(1)) + member("d.1/x.json", "{}") + member("d.1/x.cls", "4\n") +
                         member("d.1/y.cls", "-2") + member("d.1/y.npy", number(2)) + member(".hidden.cls", "1"));
  EXPECT_EQ(targets_in(path), (std::vector<int64_t>{4, -2}));
  EXPECT_EQ(ShardReader(path).info().classes, 5);
  EXPECT_EQ(ShardReader(path, 7).info().classes, 7);
  EXPECT_EQ(open(path)->classes(), 5);
}

TEST_F(ForeignShards, may_have_long_names) {
  const std::string name = std::string(120, 'd') + "/" + std::string(130, 'n');
  std::string prefixed = with_sum(member("y.cls", "3"), 'd' + 'i' + 'r');
  std::string("dir").copy(prefixed.data() + 345, 3);
  const auto path = write("a.tar", before('L', name + ".cls" + '\0') + member("cut", "1") + before('g', "ignored") +
                                       before('x', concat(name.size() + 14, " path=", name, ".npy\n")) +
                                       member("cut", number(1)) + prefixed + member("dir/y.npy", number(2)));
  EXPECT_EQ(targets_in(path), (std::vector<int64_t>{1, 3}));
  EXPECT_TRUE(contains(refusal(before('x', "99 path=short\n")), "pax records that can't be read"));
  EXPECT_TRUE(contains(refusal(before('x', "22 GNU.sparse.major=1\n")), "pax records that can't be read"));
}

TEST_F(ForeignShards, are_refused_if_a_sample_is_not_whole_or_has_two_of_a_kind) {
  EXPECT_TRUE(contains(refusal(member("a.npy", number(1))), "no .cls file with a whole number"));
  EXPECT_TRUE(contains(refusal(member("a.npy", number(1)) + member("a.cls", "cat")), "no .cls file with a whole"));
  EXPECT_TRUE(contains(refusal(member("a.cls", "1")), "no .jpg, .jpeg, .png or .npy"));
  const std::string sample = member("a.npy", number(1)) + member("a.cls", "1");
  EXPECT_TRUE(contains(refusal(sample + sample), "a.npy is a second target, image or array of its sample"));
  EXPECT_TRUE(contains(refusal(sample + member("a.cls", "1")), "a.cls is a second"));
  EXPECT_TRUE(contains(refusal(before('2', "") + sample), "x is a link or special"));
  const std::string fortran = npy_text("<f4", "(2, 1)", std::string(8, '\0'), true);
  EXPECT_TRUE(contains(refusal(member("a.cls", "1") + member("a.npy", fortran)), "Fortran order"));
  EXPECT_TRUE(contains(refusal(member("a.cls", "1") + member("a.npy", "no array")), "no magic number"));
}

TEST_F(ForeignShards, are_refused_if_compressed) {
  write("00.tar", member("a.npy", number(1)) + member("a.cls", "1"));
  write_file(folder / "01.tar.gz", "\x1F\x8B\x08");
  const std::string message = message_of<DataError>([&] { open(folder.path()); });
  EXPECT_TRUE(contains(message, "01.tar.gz: it is compressed"));
  EXPECT_TRUE(contains(message, "gunzip it"));
}

TEST_F(ForeignShards, are_named_by_braces_and_in_two_parts) {
  for (int i = 8; i < 12; ++i)
    write(concat("t-", i < 10 ? "0" : "", i, ".tar"), member("a.npy", number(1)) + member("a.cls", std::to_string(i)));
  EXPECT_EQ(targets_in(folder / "t-{09..11}.tar"), (std::vector<int64_t>{9, 10, 11}));
  EXPECT_TRUE(contains(message_of<DataError>([&] { open(folder / "t-{09..12}.tar"); }), "t-12.tar: No such file"));
  for (const char* target : {"00", "01", "10", "11"})
    write(concat("s", target[0], "-", target[1], ".tar"), member("a.npy", number(1)) + member("a.cls", target));
  EXPECT_EQ(targets_in(folder / "s{0..1}-{0..1}.tar"), (std::vector<int64_t>{0, 1, 10, 11}));
  const std::string both = concat("webdataset:", (folder / "t-{08..10}.tar").string(), ",", folder.file("t-11.tar"));
  const Datasets data = open_dataset({.data = both});
  EXPECT_EQ(data.train->size(), 3);
  ASSERT_NE(data.validation, nullptr);
  EXPECT_EQ(data.validation->size(), 1);
  std::filesystem::create_directory(folder / "a,b");
  write("a,b/0.tar", member("a.npy", number(1)) + member("a.cls", "1"));
  EXPECT_EQ(open_dataset({.data = "webdataset:" + folder.file("a,b")}).train->size(), 1);
}

}  // namespace
}  // namespace lockstep
