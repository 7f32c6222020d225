"""The fake model server itself: what the other tests rely on."""

import aiohttp
import pytest

from tests.fakes.model_server import (
    HALF_A_REPLY,
    ScriptedServer,
    ServerProcess,
    by_turn,
    call,
    drop,
    fail,
    final_answer,
    in_order,
    raw,
    say,
    token_of,
)


async def post(server: ScriptedServer, *messages: dict, path: str = "/chat/completions", **body):
    async with (
        aiohttp.ClientSession() as session,
        session.post(server.base_url + path, json={"messages": messages, **body}) as response,
    ):
        return response.status, await response.json(content_type=None)


USER = {"role": "user", "content": "2+2?"}


async def test_a_request_is_recorded_as_it_came(start_server):
    server = await start_server(lambda request: say("4", reasoning="easy"))
    status, reply = await post(server, USER, model="m")
    message = reply["choices"][0]["message"]
    assert (status, message["content"], message["reasoning_content"]) == (200, "4", "easy")
    (request,) = server.requests
    assert (request.path, request.prompt, request.turn, request.body["model"]) == (
        "/v1/chat/completions",
        "2+2?",
        0,
        "m",
    )


async def test_the_turn_counts_answers_after_the_last_user_message(start_server):
    server = await start_server(by_turn(call("terminal", {"command": "ls"}), say("done")))
    prefill = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    _, first = await post(server, *prefill, USER)
    _, second = await post(server, *prefill, USER, first["choices"][0]["message"])
    assert first["choices"][0]["finish_reason"] == "tool_calls"
    assert second["choices"][0]["message"]["content"] == "done"
    assert [request.turn for request in server.requests] == [0, 1]
    assert server.requests[0].first_prompt == "hi"


async def test_errors_and_bodies_of_any_kind_can_be_scripted(start_server):
    server = await start_server(in_order(fail(429, "slow down", headers={"Retry-After": "1"}), raw("[]")))
    assert await post(server, USER) == (429, {"error": {"message": "slow down", "type": "scripted"}})
    assert await post(server, USER) == (200, [])
    assert await post(server, USER) == (200, [])
    assert server.statuses == {429: 1, 200: 2}


@pytest.mark.parametrize("answer", [drop(), drop(HALF_A_REPLY)])
async def test_a_connection_can_be_dropped_before_or_within_the_reply(start_server, answer):
    server = await start_server(lambda request: answer)
    with pytest.raises(aiohttp.ClientError):
        await post(server, USER)
    assert server.statuses == {0: 1}


async def test_another_route_is_not_found(scripted_server):
    assert (await post(scripted_server, path="/embeddings"))[0] == 404


async def test_as_a_proxy_it_answers_for_any_host(scripted_server):
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            "http://openrouter.ai/api/v1/chat/completions",
            json={"messages": [USER]},
            proxy=scripted_server.proxy_url,
        ) as response,
    ):
        assert response.status == 200
    (request,) = scripted_server.requests
    assert (request.host, request.path) == ("openrouter.ai", "/api/v1/chat/completions")


async def test_three_turns_ends_with_what_the_tools_showed(scripted_server):
    tools = [{"type": "function", "function": {"name": name}} for name in ("terminal", "write_file")]
    messages = [USER]
    names = []
    for output in (token_of("2+2?"), "written"):
        _, reply = await post(scripted_server, *messages, tools=tools)
        message = reply["choices"][0]["message"]
        names += [entry["function"]["name"] for entry in message["tool_calls"]]
        tool = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": output}
        messages += [message, tool]
    _, reply = await post(scripted_server, *messages, tools=tools)
    assert names == ["terminal", "write_file"]
    assert reply["choices"][0]["message"]["content"] == final_answer("2+2?")


async def test_as_a_process_it_gives_its_counters_and_requests():
    with ServerProcess("one_turn") as server:
        await post(server, USER)
        assert server.counters() == {"requests": 1, "max_in_flight": 1, "statuses": {"200": 1}}
        assert [request.prompt for request in server.requests()] == ["2+2?"]
        server.clear()
        assert server.counters()["requests"] == 0
        process = server._process
    assert process.poll() == 0
